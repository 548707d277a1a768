"""`prediction`: drafts go on in the text that the request expects, and find their place again."""

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.prediction import Prediction, PredictionConfig
from paceline.engine.engine import Engine
from tests.draft.rows import letters, row, tokens
from tests.fakes import TableTarget

TARGET = TableTarget(vocab_size=32, order=3, seed=1)
PROMPT = [1, 2, 3]


def answer(prediction, **more):
    params = SamplingParams(max_tokens=40, prediction=prediction, **more)
    (done,) = Engine(TARGET, Prediction()).generate([PROMPT], params)
    return done


def test_what_was_expected_is_copied():
    plainly = answer([])
    assert plainly.stats.draft_tokens == 0
    done = answer(plainly.tokens)
    assert done.tokens == plainly.tokens
    assert done.rounds < 6


def test_an_edit_in_the_middle_costs_a_few_rounds():
    plainly = answer([])
    expected = [*plainly.tokens[:12], 9, 9, 9, *plainly.tokens[15:]]
    done = answer(expected)
    assert done.tokens == plainly.tokens
    assert done.rounds < 12


def test_of_several_places_the_next_one_counts():
    drafter = Prediction(PredictionConfig(draft=2))
    one = row("?", prediction=tokens("abXXabYYabZ"))
    drafter.start(one)
    for said, expected in (("ab", "XX"), ("XXab", "YY"), ("q", "")):
        one.extend(tokens(said))
        assert letters(drafter.draft(one, 9).tokens[1:]) == expected
