"""Sorted drafts: exits, the states that wait for deeper layers, and that no answer depends on any of it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.draft.methods.s2d import LAG, Sorted, exits_in_use
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.target.load import load, load_tokenizer
from paceline.train.saving import save_drafter
from tests import models

LAYERS = 4
GREEDY = SamplingParams(max_tokens=16)
LONG = SamplingParams(max_tokens=100)
WARM = SamplingParams(temperature=0.8, max_tokens=16)


class World:
    """A random target whose first layers are the draft, and prompts that two drafts are unlike."""

    def __init__(self, folder):
        self.folder = models.make("llama3", folder / "target", num_hidden_layers=LAYERS, hidden_size=32)
        self.tokenizer = load_tokenizer(self.folder)
        self.target = load(self.folder, dtype="float32", device="cpu")
        # The draft is a little off the target, or nothing would ever be rejected at full depth.
        draft = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in draft.parameters():
                weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
        self.draft = folder / "draft"
        draft.save_pretrained(self.draft)
        self.tokenizer.inner.save_pretrained(self.draft)
        rng = np.random.default_rng(2)
        self.prompts = [rng.integers(4, 288, n).tolist() for n in (9, 1, 80, 3, 17, 30, 2, 5)]

    def engine(self, options, batch=8, **kw):
        if "stop=" not in options:  # a random model is never sure: the default would stop behind the first token
            options += ",stop=heuristic"
        return Engine(self.target, f"s2d:{self.draft},{options}", tokenizer=self.tokenizer, max_batch=batch, **kw)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("sorted"))


def drafter_of(engine):
    assert isinstance(engine.drafter, Sorted)
    return engine.drafter


def left(drafter):
    return [section.exits_taken for section in drafter.sections]


# What a step says -------------------------------------------------------------------------------------------------


class Alone:
    """A drafter without an engine, and a row whose tokens the test decides."""

    def __init__(self, world, options, prompt, params=LONG):
        drafter = create(f"s2d:{world.draft},{options}")
        assert isinstance(drafter, Sorted)
        self.drafter, self.model = drafter, AutoModelForCausalLM.from_pretrained(world.draft, dtype=torch.float32)
        drafter.bind(world.target)
        self.row = Row(0, prompt, params, max_context=models.MAX_CONTEXT)
        drafter.start(self.row)

    def force(self, exit):
        """Let the next tokens leave at this exit: it has a threshold of 0, those before it have one of 1."""
        for number, section in enumerate(self.drafter.sections):
            section.threshold = 0.0 if number >= exit else 1.0

    def step(self, draft, wanted=1):
        return self.drafter.proposer.run([draft], [wanted])

    def begin(self):
        return self.drafter.model.begin(self.row)

    def check(self):
        """The invariant: section k is never ahead of the one before it, and what it lacks waits for it."""
        slot = self.drafter.model.slot(self.row)
        held = [section.cache.length(slot) + section.ran[slot] for section in self.drafter.sections]
        assert held == sorted(held, reverse=True)
        waiting = [len(section.waiting[slot]) for section in self.drafter.sections]
        assert waiting == [0, *(before - behind for before, behind in pairwise(held))]

    def check_cache(self, committed):
        """Every key and value held is the one a model run over all tokens would have."""
        slot = self.drafter.model.slot(self.row)
        truth = self.model(torch.tensor([list(committed)]), use_cache=True).past_key_values
        for section in self.drafter.sections:
            n = section.cache.length(slot)
            for place, layer in enumerate(range(section.first, section.last)):
                held = section.cache.kv[place, :, slot, :, :n]
                torch.testing.assert_close(held[0], truth.layers[layer].keys[0, :, :n], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(held[1], truth.layers[layer].values[0, :, :n], atol=1e-4, rtol=1e-4)

    @torch.inference_mode()
    def truth(self, text, layers):
        """Logits behind `text` of a model of the first `layers` layers."""
        states = self.model.model(torch.tensor([list(text)]), output_hidden_states=True)
        last = states.last_hidden_state if layers == LAYERS else self.model.model.norm(states.hidden_states[layers])
        logits = self.model.lm_head(last[0, -1])
        return logits


def test_an_exit_says_what_a_model_of_its_depth_says_whatever_was_left_before(world):
    rng = np.random.default_rng(3)
    alone = Alone(world, "exits=1,2,4,thresholds=0.5", world.prompts[0])
    text = list(world.prompts[0])
    for _ in range(12):
        draft = alone.begin()
        for _ in range(int(rng.integers(1, 6))):
            exit = int(rng.integers(3))
            alone.force(exit)
            before = left(alone.drafter)
            logits = alone.step(draft)
            assert np.flatnonzero(np.array(left(alone.drafter)) - before).tolist() == [exit]
            expected = alone.truth([*text, *draft.drafted], alone.drafter.sections[exit].last)
            torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
            alone.check()
            draft.add(int(rng.integers(4, 288)))
        # Some of the drafted tokens that were run stand, and a token of the target's comes behind them.
        stood = int(rng.integers(alone.drafter.model.ran[0] - draft.num_committed + 1))
        alone.drafter.model.commit(draft, range(draft.num_committed + stood))
        alone.check()
        alone.row.extend([*draft.drafted[:stood], int(rng.integers(4, 288))])
        text = alone.row.tokens.tolist()
        alone.check_cache(text)


def test_a_long_prompt_comes_in_chunks_through_every_layer(world, monkeypatch):
    monkeypatch.setattr("paceline.draft.models.draft_model.CHUNK", 16)
    alone = Alone(world, "exits=1,2,4,thresholds=0.01", world.prompts[2])
    alone.drafter.model.catch_up(alone.row)
    assert {section.cache.length(0) for section in alone.drafter.sections} == {64}
    alone.check_cache(world.prompts[2])
    logits = alone.step(alone.begin())
    torch.testing.assert_close(logits[0], alone.truth(world.prompts[2], 1), atol=1e-4, rtol=1e-4)


def test_of_a_long_prompt_the_last_tokens_are_read(world):
    """Every exit, and the layers that catch up later, see just the text from there on."""
    prompt = world.prompts[2]
    alone = Alone(world, "exits=1,2,4,thresholds=0.5,context=16", prompt)
    alone.drafter.model.catch_up(alone.row)
    text = prompt[-16:]
    for exit, layers in ((0, 1), (1, 2), (2, LAYERS)):
        alone.force(exit)
        draft = alone.begin()
        assert draft.num_committed == (16 if exit == 0 else 1)
        torch.testing.assert_close(alone.step(draft)[0], alone.truth(text, layers), atol=1e-4, rtol=1e-4)
        alone.drafter.model.commit(draft, range(draft.num_committed))
        alone.check()
        alone.check_cache(text)
        alone.row.extend([30 + exit])
        text = [*text, 30 + exit]


def test_a_row_that_is_too_far_behind_goes_through_all_layers(world):
    alone = Alone(world, "exits=1,2,4,thresholds=0.01", world.prompts[1])
    fill = [5] * LAG
    for token in fill:
        draft = alone.begin()
        alone.step(draft)
        alone.drafter.model.commit(draft, range(draft.num_committed))
        alone.row.extend([token])
        alone.check()
    assert left(alone.drafter) == [LAG, 0, 0]
    assert len(alone.drafter.sections[1].waiting[0]) == LAG
    logits = alone.step(alone.begin())
    assert left(alone.drafter) == [LAG, 0, 1]
    torch.testing.assert_close(logits[0], alone.truth([*world.prompts[1], *fill], LAYERS), atol=1e-4, rtol=1e-4)
    assert [len(section.waiting[0]) for section in alone.drafter.sections] == [0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_exit_is_chosen_at_the_temperature_of_the_request(world, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=24)
    for above, exit in ((-0.01, 0), (0.01, 1)):
        alone = Alone(world, "exits=1,4,thresholds=0.5", world.prompts[0], params)
        best = float((alone.truth(world.prompts[0], 1) / (temperature or 1)).softmax(-1).max())
        alone.drafter.sections[0].threshold = best + above
        alone.step(alone.begin())
        assert left(alone.drafter) == [exit == 0, exit == 1]


def test_a_level_of_a_tree_leaves_as_one_where_its_surest_node_may(world):
    prompt, children = world.prompts[0], [20, 30, 40]
    for above, layers in ((-0.01, 1), (0.01, LAYERS)):
        alone = Alone(world, "exits=1,4,thresholds=0.5", prompt)
        surest = max(float(alone.truth([*prompt, child], 1).softmax(-1).max()) for child in children)
        draft = alone.begin()
        alone.force(0)
        alone.step(draft)
        for child in children:
            draft.add(child, len(prompt) - 1)
        alone.drafter.sections[0].threshold = surest + above
        logits = alone.step(draft, wanted=3)
        for row, child in zip(logits, children, strict=True):
            torch.testing.assert_close(row, alone.truth([*prompt, child], layers), atol=1e-4, rtol=1e-4)
        alone.check()
        # The last child stands: of the tree, its keys and values are all that stay.
        alone.drafter.model.commit(draft, [*range(len(prompt)), len(prompt) + 2])
        alone.check()
        alone.row.extend([40, 50])
        alone.check_cache(alone.row.tokens.tolist())
        alone.force(1)
        logits = alone.step(alone.begin())
        torch.testing.assert_close(logits[0], alone.truth([*prompt, 40, 50], LAYERS), atol=1e-4, rtol=1e-4)


def test_of_a_batch_only_those_that_go_on_are_run_deeper(world):
    alone = Alone(world, "exits=1,4,thresholds=0.5", world.prompts[0])
    other = Row(1, world.prompts[4], LONG, max_context=models.MAX_CONTEXT)
    alone.drafter.start(other)
    rows = [alone.row, other]
    best = [float(alone.truth(row.tokens.tolist(), 1).softmax(-1).max()) for row in rows]
    alone.drafter.sections[0].threshold = sum(best) / 2
    drafts = [alone.drafter.model.begin(row) for row in rows]
    logits = alone.drafter.model.extend(drafts, [1, 1])
    deeper = alone.drafter.sections[1]
    for row, sure, found in zip(rows, best, logits, strict=True):
        layers = 1 if sure == max(best) else LAYERS
        torch.testing.assert_close(found, alone.truth(row.tokens.tolist(), layers), atol=1e-4, rtol=1e-4)
        slot = alone.drafter.model.slot(row)
        assert (deeper.ran[slot], len(deeper.waiting[slot])) == ((0, len(row)) if layers == 1 else (len(row), 0))
    assert left(alone.drafter) == [1, 1]


# Thresholds -------------------------------------------------------------------------------------------------------


def test_exits_in_use():
    assert exits_in_use([2, 4, 8], [0.5], 8) == [(2, 0.5), (4, 0.5), (8, 0.0)]
    assert exits_in_use([2, 4, 8], [0.5, 0.7], 12) == [(2, 0.5), (4, 0.7), (8, 0.0)]
    assert exits_in_use([2, 4, 8], [1.0, 0.7], 8) == [(4, 0.7), (8, 0.0)]
    assert exits_in_use([2, 4, 8], [0.5, 0.0], 8) == [(2, 0.5), (4, 0.0)]
    assert exits_in_use([8], [0.5], 8) == [(8, 0.0)]


def test_above_one_every_token_takes_all_layers_and_at_zero_the_first_exit(world):
    each = ("exits=1,2,4,thresholds=1.01", "exits=1,2,4,thresholds=0", "exits=1", "exits=4")
    never, always, first, model = (world.engine(options) for options in each)
    plain_model = Engine(world.target, f"model:{world.draft},stop=heuristic", tokenizer=world.tokenizer)
    wishes = [WARM if i % 2 else GREEDY for i in range(8)]
    wishes = [SamplingParams(temperature=w.temperature, max_tokens=24, seed=i) for i, w in enumerate(wishes)]
    made = [e.generate(world.prompts, wishes) for e in (never, always, first, model, plain_model)]
    runs = [[(one.tokens, one.rounds, one.stats.drafted) for one in out] for out in made]
    assert runs[0] == runs[3] == runs[4]
    assert runs[1] == runs[2] != runs[0]
    assert [section.last for e in (never, always) for section in drafter_of(e).sections] == [LAYERS, 1]
    assert len(drafter_of(always).sections) == 1  # the layers behind it are never run
    assert drafter_of(always).weight_bytes < drafter_of(never).weight_bytes == plain_model.drafter.weight_bytes
    assert drafter_of(always).mean_bytes == drafter_of(always).weight_bytes
    assert drafter_of(never).mean_bytes == drafter_of(never).weight_bytes, "an exit that is never taken is none"


def test_the_tokens_of_every_exit_are_counted(world):
    """Between these thresholds lies a random model's confidence: tokens leave at every exit."""
    engine = world.engine("exits=1,2,4,thresholds=0.06,0.05", 3)
    out = engine.generate(world.prompts, GREEDY)
    sections = drafter_of(engine).sections
    assert sum(s.exits_taken for s in sections) == sum(one.stats.draft_tokens for one in out)
    assert all(s.exits_taken for s in sections)


# Checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint(world, out, **changes):
    """The draft of the world as its training would write it."""
    network = AutoModelForCausalLM.from_pretrained(world.draft)
    config = network.config.to_dict() | {"exits": [1, 2, 4], "recipe": {}} | changes
    facts = TargetFacts("another", world.tokenizer.fingerprint, "", 8, 2, models.VOCAB_SIZE)
    save_drafter(out, "s2d", config=config, tensors=dict(network.named_parameters()), target=facts)
    world.tokenizer.inner.save_pretrained(out)
    return out


def test_thresholds_are_those_that_training_noted(world, tmp_path):
    def thresholds(options="", **noted):
        draft = checkpoint(world, tmp_path / "draft", **noted)
        engine = Engine(world.target, f"s2d:{draft}{options}", tokenizer=world.tokenizer)
        return [section.threshold for section in drafter_of(engine).sections]

    assert thresholds() == thresholds(thresholds=None) == [0.5, 0.5, 0]  # the paper's
    assert thresholds(thresholds=[0.7, 0.3]) == [0.7, 0.3, 0]
    assert thresholds(thresholds=[0.0, 0.3]) == [0]
    assert thresholds(",thresholds=0.2", thresholds=[0.7, 0.3]) == [0.2, 0.2, 0]
    assert thresholds(",exits=1,4", thresholds=[0.7, 0.3]) == [0.5, 0]  # they are of other exits


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("exits=1,5", r"exits are 1,5; they are layers from 1 to 4, each above the last"),
        ("exits=2,2,4", "each above the last"),
        ("exits=0,4", "layers from 1 to 4"),
        ("exits=1;2", "exits is '1;2'; it must be numbers with commas between, as in 2,4,8"),
        ("exits=1,2,4,thresholds=0.1,0.2,0.3", "give one for all, or one for each exit but the last"),
        ("exits=1,4,thresholds=-0.1", "a threshold is -0.1; it is between 0"),
        ("exits=1,4,thresholds=1.5", "a threshold is 1.5; it is between 0"),
        ("exits=1,4,thresholds=high", "thresholds is 'high'"),
        ("thresholds=0.5", "is a model and no drafter of kind s2d"),
    ],
)
def test_wrong_options_are_one_clear_line(world, options, says):
    with pytest.raises(MethodError, match=says) as error:
        world.engine(options)
    assert "\n" not in str(error.value)


def test_wrong_checkpoints_are_one_clear_line(world, tmp_path):
    def refused(folder, says):
        with pytest.raises(MethodError, match=says) as error:
            Engine(world.target, f"s2d:{folder}", tokenizer=world.tokenizer)
        assert "\n" not in str(error.value)

    other = checkpoint(world, tmp_path / "other")
    models.tokenizer(280).save_pretrained(other)
    refused(other, "has another tokenizer than the target: ")
    refused(checkpoint(world, tmp_path / "kind", paceline_drafter="kangaroo"), "kind kangaroo where s2d is wanted")
    refused(checkpoint(world, tmp_path / "exits", exits=[]), "does not say after which layers it has exits")
    refused(checkpoint(world, tmp_path / "words", thresholds=["high"]), "has thresholds that are not numbers")
    refused(checkpoint(world, tmp_path / "below", thresholds=[-1, 0.5]), "a threshold is -1; it is between 0")
    refused(checkpoint(world, tmp_path / "many", thresholds=[0.5] * 3), "one for each exit but the last")
    foreign = models.make("gpt2", tmp_path / "foreign")
    with pytest.raises(MethodError, match="does not run in the native decoder"):
        Engine(world.target, f"s2d:{foreign},exits=1,3", tokenizer=world.tokenizer)
