"""The card: loops are told from long answers, and tables follow from what was measured."""

from paceline.train.card import PROMPTS, Answer, counts, loops


def test_loops() -> None:
    assert loops([1, 2, 3] * 30)
    assert loops([*range(500, 600), *([7] * 64)])
    assert loops(list(range(16)) * 4)
    assert not loops(list(range(17)) * 8)  # the n-gram is too long
    assert not loops([1, 2, 3] * 10)  # too short to tell
    assert not loops([*([7] * 64), 8])


def test_counts() -> None:
    answers = [
        Answer("chat", "?", "!", 10, ended=True, loops=False),
        Answer("chat", "?", "!", 160, ended=False, loops=True),
        Answer("summary", "?", "!", 40, ended=True, loops=False),
    ]
    rows = counts(answers).splitlines()[2:]
    assert rows == ["| chat | 2 | 1 | 1 | 85 |", "| summary | 1 | 1 | 0 | 40 |", "| all | 3 | 2 | 1 | 70 |"]


def test_six_kinds_of_four() -> None:
    assert [len(prompts) for prompts in PROMPTS.values()] == [4] * 6
