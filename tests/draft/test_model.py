"""`model:PATH`: any causal model with the target's tokenizer drafts, whatever runs it and however short its context."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from paceline.core.accept import Accepted
from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft.methods.model import Model, OwnTokenizerConfig, check_tokenizer
from paceline.draft.models.draft_model import CHUNK
from paceline.engine.engine import Engine
from paceline.errors import MethodError, PacelineError
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.target.hf import HFTarget
from paceline.target.load import load, load_tokenizer
from tests import models, native
from tests.asks import asked
from tests.draft.answered import target_and_close_draft
from tests.draft.drafting import SPECS, DraftTable, drafter, like
from tests.draft.prompts import PROMPTS, plain
from tests.fakes import TableTarget
from tests.pairs import paired
from tests.rounds import shown

NEW = 10
GREEDY = SamplingParams(max_tokens=NEW)
TEXTS = ["the cat and the dog", "there was", "and then the little cat said: hello the cat"]
RULES = ["fixed", "svip", "heuristic", "fixed,tree=9,width=3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a draft model that is nearly the same, and one of an architecture that only transformers runs."""
    at = tmp_path_factory.mktemp("models")
    return {
        **target_and_close_draft(at, 0.03),
        "foreign": models.make("gpt2", at / "foreign", n_embd=16, n_layer=2, n_head=2),
        "short": models.make("llama2", at / "short", max_position_embeddings=24, **native.TINY),
        "narrow": models.make("llama2", at / "narrow", vocab_size=288, **native.TINY),
        "wide": models.make("llama2", at / "wide", vocab_size=384, **native.TINY),
    }


def written(target, draft, params=GREEDY, **options):
    return Engine(str(target), draft, dtype="float32", device="cpu", **options).generate(TEXTS, params)


# Lossless ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [("target", "foreign"), ("foreign", "close")])
def test_any_pair_writes_what_the_target_alone_writes(folders, target, draft):
    """A draft model in transformers behind a native target, and the other way round."""
    for rule in (RULES[1], RULES[-1]):
        out = written(folders[target], f"model:{folders[draft]},stop={rule}", max_batch=2)
        assert [done.tokens for done in out] == [done.tokens for done in written(folders[target], "none")]
        assert sum(done.stats.draft_tokens for done in out) > 0


def test_a_close_draft_saves_forwards(folders):
    plainly = written(folders["target"], "none")
    for rule in RULES:
        out = written(folders["target"], f"model:{folders['close']},stop={rule}")
        assert sum(done.rounds for done in out) < 0.85 * sum(done.rounds for done in plainly)


# A context and a vocabulary that are not the target's -----------------------------------------------------------------


@pytest.mark.parametrize("spec", ["svip", "tree"])
def test_a_draft_model_with_a_shorter_context(spec):
    """It drafts as long as it can read the whole text, and no further: the table would refuse."""
    target = TableTarget(vocab_size=8, order=2, seed=4)
    table = like(target, 0.5)
    table.max_context = 20
    params = SamplingParams(max_tokens=40)
    made = drafter(table, **SPECS[spec])
    out = Engine(target, made).generate(PROMPTS, params)
    assert [(done.tokens, done.finish_reason) for done in out] == plain(target, params)
    *fitting, too_long = out
    assert all(done.stats.draft_tokens > 0 for done in fitting)
    assert too_long.stats.draft_tokens == 0


def test_room_is_used_to_the_last_token():
    """The last drafted token is not run: a text of n tokens can be drafted for by a context of n."""
    table = DraftTable(6, order=1, max_context=10)
    made = drafter(table, stop="fixed", draft=5)
    made.bind(TableTarget(vocab_size=6))
    for length, drafted in ((5, 5), (6, 5), (7, 4), (9, 2), (10, 1), (11, 0)):
        row = Row(length, [1] * length, GREEDY, max_context=4096)
        made.start(row)
        assert made.propose(asked(row))[0].num_drafted == drafted
        made.drop(row)


@pytest.mark.parametrize(("draft", "temperature"), paired(["narrow", "wide"], [0.0, 0.8]))
def test_rows_of_padding_may_differ(folders, draft, temperature):
    """The target has 320 rows for 288 tokens, the draft models 288 and 384; ids mean the same."""
    params = SamplingParams(max_tokens=NEW, temperature=temperature, repetition_penalty=1.1, seed=1)
    spec = f"model:{folders[draft]},stop=fixed"
    out = written(folders["target"], spec, params)
    assert [done.tokens for done in out] == [done.tokens for done in written(folders["target"], "none", params)]
    assert sum(done.stats.draft_tokens for done in out) > 0


def test_a_narrower_draft_takes_the_noise_of_its_own_tokens():
    made = drafter(DraftTable(5, order=1), stop="fixed", draft=2)
    made.bind(TableTarget(vocab_size=8))
    row = Row(0, [1, 2], SamplingParams(temperature=1.0, seed=0), max_context=4096)
    made.start(row)
    (tree,) = made.propose(asked(row))
    for depth in (1, 2):
        q = made.network.probabilities_after([1, *tree.tokens[:depth].tolist()][-1:], row.params)
        assert tree.tokens[depth] == row.noise.choose(torch.cat([q, torch.zeros(3)]), depth - 1)
    strange = Row(1, [1, 7], GREEDY, max_context=4096)
    made.start(strange)
    assert made.propose(asked(strange))[0].num_drafted == 0, "a token that the draft model has no row for"


def test_a_long_prompt_is_run_in_chunks():
    table = DraftTable(6, order=1, max_context=5000)
    made = drafter(table, stop="fixed", draft=2)
    made.bind(TableTarget(vocab_size=6, max_context=5000))
    row = Row(0, np.arange(2 * CHUNK + 7) % 6, GREEDY, max_context=5000)
    made.start(row)
    made.propose(asked(row))
    assert table.ran == [[CHUNK], [CHUNK], [7], [1]]


# A draft model that reads a part of the text ------------------------------------------------------------------------


def test_a_draft_reads_the_last_tokens_and_goes_on_from_there():
    """Of a table that goes by two tokens, two are enough to draft what the whole text would."""
    target = TableTarget(vocab_size=8, order=2, seed=4)
    prompt = list(np.arange(50) % 8)
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    runs = []
    for context in (None, 10):
        table = like(target, 0.0)
        made = drafter(table, stop="fixed", draft=3, context=context)
        (done,) = Engine(target, made).generate([prompt], params)
        runs.append((done.tokens, done.rounds, done.stats.accepted))
        read = table.ran[0]
        assert read == ([51] if context is None else [10])
        assert all(nodes <= [2] for nodes in table.ran[1:]), "what was read stays read"
    assert runs[0] == runs[1]
    assert runs[0][1:] == (4, [1, 0, 0, 3])


@pytest.mark.parametrize("spec", ["svip", "tree"])
def test_a_draft_whose_own_context_is_full_begins_anew(spec):
    """Texts of up to 45 tokens and more, a draft model that can read 20: it goes on drafting, 8 tokens back."""
    target = TableTarget(vocab_size=8, order=2, seed=4)
    table = like(target, 0.5)
    table.max_context = 20
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    made = drafter(table, context=8, **SPECS[spec])
    out = Engine(target, made).generate(PROMPTS, params)
    assert [(done.tokens, done.finish_reason) for done in out] == plain(target, params)
    assert all(done.stats.draft_rounds >= done.rounds - 2 for done in out), "all but the first and the last"


def test_behind_another_drafter_it_skips_what_was_copied_meanwhile():
    table = DraftTable(6, order=1)
    made = drafter(table, stop="fixed", draft=1, context=5)
    made.bind(TableTarget(vocab_size=6))
    row = Row(0, [1, 2, 3], SamplingParams(max_tokens=60), max_context=4096)
    made.start(row)
    made.propose(asked(row))
    made.observe(shown([row], [DraftTree.root(3)], [Accepted([0], [4])]))
    row.extend([4, 5])
    assert made.model.length(row) == 3
    made.propose(asked(row))
    row.extend([0] * 20)
    made.observe(shown([row], [DraftTree.root(3)], [Accepted([0], [4])]))
    made.propose(asked(row))
    assert table.ran == [[3], [2], [5]]


# What is refused -----------------------------------------------------------------------------------------------------


def refused(target, spec):
    with pytest.raises(PacelineError) as error:
        Engine(str(target), spec, dtype="float32", device="cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_context_that_cannot_be(folders):
    says = refused(folders["target"], f"model:{folders['close']},context=0")
    assert "model: context is 0; it must be 1 or more." in says
    says = refused(folders["target"], f"model:{folders['short']},context=25")
    assert "context is 25" in says
    assert "can read 24 tokens" in says


def test_another_tokenizer_is_refused_with_what_differs(folders, tmp_path):
    folder = models.make("llama2", tmp_path / "other", vocab_size=320, **native.TINY)
    models.tokenizer(280).save_pretrained(folder)
    says = refused(folders["target"], f"model:{folder}")
    assert "has another tokenizer than the target: 0 of its 280 tokens the target does not have" in says
    assert "8 of the target's 288 it does not have, 0 have another id" in says


def test_the_same_tokens_with_other_ids_are_another_tokenizer(folders, tmp_path):
    file = folders["target"] / "tokenizer.json"
    spelled = json.loads(file.read_text())
    vocab = spelled["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.get)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    moved = tmp_path / "moved"
    models.tokenizer().save_pretrained(moved)
    (moved / "tokenizer.json").write_text(json.dumps(spelled))
    with pytest.raises(MethodError, match="2 have another id"):
        check_tokenizer("moved", load_tokenizer(moved), load_tokenizer(folders["target"]))


def test_a_draft_model_without_a_tokenizer_remembers_its_targets(folders, tmp_path):
    """As the drafters that are shipped for a model whose tokenizer is not ours to ship."""
    target, bare = load(folders["target"], dtype="float32", device="cpu"), tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((folders["close"] / "model.safetensors").read_bytes())
    config = json.loads((folders["close"] / "config.json").read_text())
    for fingerprint in (target.tokenizer.fingerprint, "another"):
        made_for = asdict(TargetFacts.of(target)) | {"tokenizer_fingerprint": fingerprint}
        (bare / "config.json").write_text(json.dumps(config | {"target": made_for}))
        if fingerprint == "another":
            with pytest.raises(MethodError, match="the two have different tokenizers"):
                Model(OwnTokenizerConfig(checkpoint=str(bare))).bind(target)
        else:
            Model(OwnTokenizerConfig(checkpoint=str(bare))).bind(target)


def test_without_tokenizers_the_vocabularies_must_be_as_large(folders):
    target = TableTarget(vocab_size=8)
    with pytest.raises(MethodError, match="knows 320 tokens and the target 8: a draft model needs the target's"):
        Model(OwnTokenizerConfig(checkpoint=str(folders["close"]))).bind(_in_float32(target))


def _in_float32(target):
    target.dtype = torch.float32
    return target


# Going on within a row, in transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama2"])
def test_a_transformers_model_goes_on_from_nodes_it_has_run(family):
    """A tree run in three parts, beside a row that is run at once, gives the logits of the whole tree; and what is
    committed of it is as if it had been run at once."""
    model = HFTarget(models.model(family))
    rng = np.random.default_rng(0)
    text, tokens = rng.integers(4, models.VOCAB_SIZE, 9), rng.integers(4, models.VOCAB_SIZE, 8)
    parent = np.array([-1, 0, 0, 1, 2, 2, 4, 5])
    slots = [model.add_row(32) for _ in range(3)]
    for slot in slots:
        model.verify([Segment.chunk(slot, text, last=False)])
        model.commit(slot, range(len(text)))
    whole = model.verify([Segment(slots[0], tokens, parent, num_logits=8)]).logits
    parts = []
    for start, end in ((0, 3), (3, 6), (6, 8)):
        beside = Segment(slots[2], tokens[:4], np.arange(-1, 3), num_logits=1)
        part = Segment(slots[1], tokens[:end], parent[:end], start=start, num_logits=end - start)
        parts.append(model.verify([beside, part] if start == 3 else [part]).of(int(start == 3)))
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)
    path = [0, 2, 5, 7]
    after = []
    for slot in slots[:2]:
        model.commit(slot, path)
        after.append(model.verify([Segment.chunk(slot, tokens[:1], last=True)]).logits)
    torch.testing.assert_close(after[0], after[1], atol=1e-4, rtol=1e-4)
