"""The native decoder: equal to transformers on plain text, and to itself on every tree, batch and seam."""

from functools import cache as memo

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests import models, native
from transformers import AutoModelForCausalLM

from paceline import kernels
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import ancestors
from paceline.engine.engine import Engine
from paceline.formats.shape import Shape
from paceline.target.base import Needs
from paceline.target.decoder import Decoder
from paceline.target.layout import SHARED_QUERIES
from paceline.target.load import load, load_tokenizer


def chain(slot, tokens, logits=None, start=0):
    n = len(tokens)
    return Segment(
        slot,
        np.array(tokens, np.int64),
        np.arange(-1, n - 1),
        start=start,
        num_logits=n - start if logits is None else logits,
    )


def plain_logits(decoder, tokens, needs=Needs()):
    """Logits [n, V] of plain text, run in one forward on a row of its own."""
    slot = decoder.add_row(1)
    verdict = decoder.verify([chain(slot, tokens)], needs)
    decoder.drop_row(slot)
    return verdict


def text(rng, n):
    return rng.integers(2, models.VOCAB_SIZE, n).tolist()


# Against transformers -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_experts_may_be_in_some_layers_alone():
    decoder, model = native.pair("qwen3-moe", decoder_sparse_step=2)
    assert [kind.experts for kind in decoder.shape.layers] == [False, True, False]
    theirs = model(torch.tensor([native.TEXT]), use_cache=False).logits[0]
    torch.testing.assert_close(native.logits(decoder), theirs, atol=2e-4, rtol=1e-4)


def test_longrope_ends_where_its_short_factors_do():
    """A longer text turns all of its tokens by other angles."""
    assert Shape.of(models.config("phi3-long")).max_context == models.MAX_CONTEXT


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("family", models.NATIVE)
@torch.no_grad()
def test_logits_and_hidden_states_are_those_of_transformers(family):
    decoder, model = native.pair(family)
    tokens = text(np.random.default_rng(3), 100)
    theirs = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    layers = tuple(range(decoder.num_layers + 1))
    ours = plain_logits(decoder, tokens, Needs(hidden_layers=layers, top_k=5))
    assert theirs.logits.std() > 0.5, "the test would see no difference"
    torch.testing.assert_close(ours.logits, theirs.logits[0], atol=2e-4, rtol=1e-4)
    for layer in layers:
        torch.testing.assert_close(ours.hidden[layer], theirs.hidden_states[layer][0], atol=2e-4, rtol=1e-4)
    values, ids = ours.top_k
    assert torch.equal(values, ours.logits.gather(1, ids))
    assert torch.equal(values, ours.logits.sort(descending=True).values[:, :5])


def logits_in_pieces(target, tokens, cuts):
    """Logits [n, V] after every token of a text that is run in pieces, on a row that has to grow."""
    slot, found = target.add_row(8), []
    for piece in np.split(np.array(tokens), cuts):
        found.append(target.verify([chain(slot, piece.tolist())]).logits.clone())
        target.commit(slot, range(len(piece)))
    assert target.length(slot) == len(tokens)
    target.drop_row(slot)
    return torch.cat(found)


@torch.no_grad()
def says_the_same(target, model, tokens, prompts, new_tokens):
    """Whether logits, in whole texts, pieces and single tokens, and greedy text are those of a transformers model."""
    logits = model(torch.tensor([tokens])).logits[0]
    assert logits.std(0).mean() > 1, "the test would see no difference"
    pieces = [logits_in_pieces(target, tokens, cuts) for cuts in ([], [70, 73, 90], [*range(1, 30), *range(80, 100)])]
    answers = Engine(target, "prompt-lookup").generate(prompts, SamplingParams(max_tokens=new_tokens))
    options = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": models.EOS}
    theirs = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    near = all(torch.allclose(ours, logits, atol=1e-4, rtol=1e-5) for ours in pieces)
    return near and [answer.tokens for answer in answers] == theirs


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("family", models.NATIVE)
def test_a_folder_says_what_the_model_said_that_was_saved_in_it(family, tmp_path):
    target = load(models.make(family, tmp_path), native=True)
    prompts = [text(np.random.default_rng(0), 7) * 3]
    assert says_the_same(target, models.model(family), text(np.random.default_rng(0), 100), prompts, 10)


def test_a_trained_model_says_what_transformers_says(stories):
    target = load(stories, dtype="float32", native=True)
    prompt = load_tokenizer(stories).encode("Once upon a time")
    tokens = np.random.default_rng(0).integers(3, 512, 100).tolist()
    model = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    assert says_the_same(target, model, tokens, [prompt], 120)
    (answer,) = Engine(target).generate([prompt], SamplingParams(max_tokens=30))
    assert answer.text.startswith(", there was a little girl named Lily. She loved to play outside in the park.")


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_a_long_piece_of_a_prompt_is_attended_to_as_in_the_whole(family):
    """Its earlier tokens and its own are attended to apart, and put together."""
    target, tokens = native.of(models.model(family)), text(np.random.default_rng(0), 120)
    whole, pieces = (logits_in_pieces(target, tokens, cuts) for cuts in ([], [40]))
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-4)


# Against itself, in any order ------------------------------------------------------------------------------------

SMALL = {"vocab_size": 23, "num_hidden_layers": 3, "max_position_embeddings": 400, **native.TINY}
HEADS = {"head_dim": 8, "linear_key_head_dim": 3, "linear_value_head_dim": 5}
SHARING = {
    "layer_types": ["sliding_attention", *["full_attention"] * 2], "num_key_value_heads": 1, "global_head_dim": 8,
    "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 23,
}  # fmt: skip
FEW = {"num_local_experts": 3, "num_experts_per_tok": 2}
KINDS = {
    "llama2": SMALL, "mistral-window": SMALL, "qwen3": SMALL, "gemma3": SMALL, "qwen3.5": SMALL | HEADS,
    "gpt-oss": SMALL | FEW,
    "gemma4": SMALL | SHARING,
}  # fmt: skip
TOLERANCE = 1e-9


class DecoderMachine(RuleBasedStateMachine):
    """Rows come, go, and run random trees and chunks in random company; every logit must be that of the node's
    plain text, run alone on a fresh decoder."""

    kind = "llama2"

    @initialize()
    def begin(self):
        self.decoder = _double(self.kind, "batch")
        self.decoder.cache = self.decoder.new_cache(3, 0)  # begin small: growing is under test
        self.rows = {}
        self.ran = {}
        self.add(1)

    @rule(expected=st.sampled_from([1, 70, 200]))
    def add(self, expected):
        if len(self.rows) < 6:
            self.rows[self.decoder.add_row(expected)] = []

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def drop(self, data):
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.decoder.drop_row(slot)
        self.rows.pop(slot)
        self.ran.pop(slot, None)

    def pick(self, data):
        return data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, unique=True))

    def tree(self, data, slot, most=9):
        n = data.draw(st.integers(1, most))
        tokens = data.draw(st.lists(st.integers(0, 22), min_size=n, max_size=n))
        parent = [-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, n))]
        return Segment(slot, np.array(tokens), np.array(parent), num_logits=n)

    def chunk(self, data, slot):
        n = data.draw(st.sampled_from([1, 2, 30, SHARED_QUERIES, SHARED_QUERIES + 1, 100]))
        n = max(1, min(n, 380 - len(self.rows[slot])))
        tokens = np.random.default_rng(data.draw(st.integers(0, 3))).integers(23, size=n)
        return chain(slot, tokens.tolist(), logits=data.draw(st.sampled_from([0, 1, n])))

    def segment(self, data, slot):
        return self.chunk(data, slot) if data.draw(st.integers(0, 3)) == 0 else self.tree(data, slot)

    @rule(data=st.data())
    def verify(self, data):
        self.run([self.segment(data, slot) for slot in self.pick(data)], Needs())

    @rule(data=st.data())
    def verify_bit_by_bit(self, data):
        """A first part of every tree, then the rest with `start`, perhaps in company that runs from the beginning."""
        trees = [self.tree(data, slot) for slot in self.pick(data)]
        cuts = [data.draw(st.integers(0, len(t.tokens) - 1)) for t in trees]
        first = [
            Segment(t.slot, t.tokens[:cut], t.parent[:cut], num_logits=cut)
            for t, cut in zip(trees, cuts, strict=True)
            if cut
        ]
        if first:
            self.run(first, Needs())
        rest = [
            Segment(t.slot, t.tokens, t.parent, start=cut, num_logits=len(t.tokens) - cut)
            for t, cut in zip(trees, cuts, strict=True)
        ]
        busy = {t.slot for t in trees}
        rest += [self.segment(data, slot) for slot in self.pick(data) if slot not in busy]
        self.run(data.draw(st.permutations(rest)), Needs())

    @rule(data=st.data(), layer=st.integers(1, 3))
    def resume(self, data, layer):
        """A self-drafter runs the first layers, a few nodes at a time; other rows come fresh."""
        trees = {slot: self.tree(data, slot, 6) for slot in self.pick(data)}
        states = {slot: [] for slot in trees}
        done = dict.fromkeys(trees, 0)
        while open_slots := [slot for slot, t in trees.items() if done[slot] < len(t.tokens)]:
            parts = []
            for slot in data.draw(st.permutations(open_slots)):
                t = trees[slot]
                end = data.draw(st.integers(done[slot] + 1, len(t.tokens)))
                parts.append(Segment(slot, t.tokens[:end], t.parent[:end], start=done[slot]))
            hidden = self.decoder.run_layers(parts, layer)
            for part, new in zip(parts, hidden.split([len(p.tokens) - p.start for p in parts]), strict=True):
                states[part.slot].append(new)
                done[part.slot] = len(part.tokens)
        for slot, t in trees.items():
            t.hidden = torch.cat(states[slot])
        every = [*trees.values(), *(self.segment(data, slot) for slot in self.pick(data) if slot not in trees)]
        self.run(data.draw(st.permutations(every)), Needs(resume_layer=layer))

    def run(self, segments, needs):
        verdict = self.decoder.verify(segments, needs)
        assert torch.isfinite(verdict.logits).all()
        for s, seg in enumerate(segments):
            logits = verdict.of(s)
            assert len(logits) == seg.num_logits
            past, sees = self.rows[seg.slot], ancestors(seg.parent)
            first = len(seg.tokens) - seg.num_logits
            nodes = range(first, len(seg.tokens))
            # One plain forward a leaf is enough: a path holds the logits of every node on it.
            checked = set()
            for node in reversed(nodes):
                if node in checked:
                    continue
                path = np.flatnonzero(sees[node])
                alone = _alone(self.kind, (*past, *seg.tokens[path].tolist()))[len(past) :]
                for i, on_path in enumerate(path.tolist()):
                    if on_path >= first:
                        torch.testing.assert_close(logits[on_path - first], alone[i], atol=TOLERANCE, rtol=TOLERANCE)
                        checked.add(on_path)
            self.ran[seg.slot] = seg

    @precondition(lambda self: self.ran)
    @rule(data=st.data())
    def commit(self, data):
        slot = data.draw(st.sampled_from(sorted(self.ran)))
        seg = self.ran.pop(slot)
        node = data.draw(st.integers(0, len(seg.tokens) - 1))
        path = np.flatnonzero(ancestors(seg.parent)[node]).tolist()
        if len(self.rows[slot]) + len(path) < 380:
            self.decoder.commit(slot, path)
            self.rows[slot] += seg.tokens[path].tolist()

    @invariant()
    def lengths_agree(self):
        assert all(self.decoder.length(slot) == len(tokens) for slot, tokens in self.rows.items())


@memo
def _double(kind, purpose):
    return native.pair(kind, torch.float64, **KINDS[kind])[0]


@memo
def _alone(kind, tokens):
    return plain_logits(_double(kind, "alone"), tokens).logits


MACHINE = settings(max_examples=10, stateful_step_count=16)


def machine(kind):
    case = type(f"DecoderMachine_{kind}", (DecoderMachine,), {"kind": kind}).TestCase
    case.settings = MACHINE
    return case


TestLlama = machine("llama2")
TestMistralWindow = machine("mistral-window")
TestQwen3 = machine("qwen3")
TestGemma3 = machine("gemma3")  # layers with a window and layers without
TestGptOss = machine("gpt-oss")  # scores without a value
TestGemma4 = machine("gemma4")  # heads of two sizes, keys of another layer, vectors of tokens
TestQwen35 = machine("qwen3.5")  # layers with a state and layers without


# Seams ----------------------------------------------------------------------------------------------------------


class Counted:
    """Wraps a decoder's layers: `nodes[layer]` counts the nodes each layer has run, `log` keeps the order."""

    def __init__(self, decoder):
        self.nodes = [0] * decoder.num_layers
        self.log = []
        for number, layer in enumerate(decoder.layers):
            decoder.layers[number] = self._wrap(number, layer)

    def _wrap(self, layer, block):
        def run(x, *rest):
            self.nodes[layer] += len(x)
            self.log.append(layer)
            return block(x, *rest)

        return run


def three_rows(decoder, seed=5):
    """Three rows of 9, 33 and 1 committed tokens."""
    rng = np.random.default_rng(seed)
    slots = []
    for length in (9, 33, 1):
        slots.append(decoder.add_row(40))
        decoder.verify([chain(slots[-1], text(rng, length), logits=0)])
        decoder.commit(slots[-1], range(length))
    return slots


PARENT = np.array([-1, 0, 0, 1, 3, 2])


def resumed_round(decoder, slots, layer, resume):
    """A round of two trees and a chunk; with `resume` the trees come from a self-drafter, drafted bit by bit."""
    rng = np.random.default_rng(6)
    trees = [Segment(slot, np.array(text(rng, 6)), PARENT, num_logits=6) for slot in slots[:2]]
    # The chunk is long enough to make the cache grow after the trees' first layers have been written.
    segments = [trees[0], chain(slots[2], text(rng, 90), logits=1), trees[1]]
    if not resume:
        return decoder.verify(segments), segments
    states = [[], []]
    for begin, end in ((0, 1), (1, 3), (3, 6)):
        parts = [Segment(t.slot, t.tokens[:end], t.parent[:end], start=begin) for t in trees]
        for state, new in zip(states, decoder.run_layers(parts, layer).chunk(2), strict=True):
            state.append(new)
    for tree, state in zip(trees, states, strict=True):
        tree.hidden = torch.cat(state)
    return decoder.verify(segments, Needs(resume_layer=layer)), segments


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_gives_the_same_logits_and_the_same_cache(layer, dtype):
    decoders = [native.pair("llama2", dtype)[0] for _ in range(2)]
    slots = [three_rows(decoder) for decoder in decoders]
    assert slots[0] == slots[1]
    before = decoders[1].cache.capacity
    plain, _ = resumed_round(decoders[0], slots[0], layer, resume=False)
    resumed, segments = resumed_round(decoders[1], slots[1], layer, resume=True)
    assert decoders[1].cache.capacity > before
    # bfloat16 keeps 8 bits, and products of another number of rows may be summed in another order.
    atol = 1e-4 if dtype == torch.float32 else 0.06 * float(plain.logits.std())
    torch.testing.assert_close(resumed.logits, plain.logits, atol=atol, rtol=1e-4)
    for segment in segments:
        path = [0, 1, 3, 4] if segment.hidden is not None else range(90)
        for decoder in decoders:
            decoder.commit(segment.slot, path)
    for slot in slots[0]:
        n = decoders[0].length(slot)
        kept = [decoder.cache.kv[:, :, slot, :, :n] for decoder in decoders]
        assert n > 9
        torch.testing.assert_close(kept[0], kept[1], atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-2)
    follow = [d.verify([chain(slot, [7, 8]) for slot in slots[0]]).logits for d in decoders]
    torch.testing.assert_close(follow[0], follow[1], atol=2 * atol, rtol=1e-4)


def test_no_layer_runs_twice_on_a_token():
    decoder, _ = native.pair("llama2")
    slots = three_rows(decoder)
    for layer, resume in ((1, True), (2, True), (1, False)):
        counted = Counted(decoder)
        resumed_round(decoder, slots, layer, resume)
        assert counted.nodes == [6 + 90 + 6] * decoder.num_layers
    counted = Counted(decoder)
    for begin, end in ((0, 2), (2, 3), (3, 6)):
        decoder.verify([Segment(slots[0], np.arange(end) + 4, PARENT[:end], start=begin, num_logits=end - begin)])
    assert counted.nodes == [6] * decoder.num_layers


def test_the_callback_comes_once_between_its_layers():
    decoder, _ = native.pair("llama2")
    slots = three_rows(decoder)
    segments = [chain(slots[0], [4, 5, 6]), chain(slots[1], [7])]
    wanted = decoder.verify(segments, Needs(hidden_layers=(0, 1, 2))).hidden
    for layer in range(3):
        counted = Counted(decoder)
        heard = []

        def listen(at, hidden, counted=counted, heard=heard):
            counted.log.append(("callback", at))
            heard.append(hidden.clone())

        verdict = decoder.verify(segments, Needs(callback_layer=layer), listen)
        assert counted.log == [*range(layer), ("callback", layer), *range(layer, 3)]
        assert len(heard) == 1
        torch.testing.assert_close(heard[0], wanted[layer], atol=1e-5, rtol=1e-5)
        assert not verdict.hidden
    decoder.verify(segments, Needs(hidden_layers=(1,)), lambda *_: pytest.fail("nobody asked"))


def test_hidden_states_of_a_ragged_batch_are_those_of_each_row_alone():
    decoder, _ = native.pair("qwen3")
    slots = three_rows(decoder)
    rng = np.random.default_rng(8)
    segments = [
        Segment(slots[2], np.array(text(rng, 6)), PARENT, num_logits=2),
        chain(slots[0], text(rng, 70), logits=0),
        chain(slots[1], text(rng, 3), logits=1),
    ]
    needs = Needs(hidden_layers=(0, 1, 3), top_k=4)
    together = decoder.verify(segments, needs)
    assert together.hidden_at == [0, 6, 76, 79]
    assert together.logits_at == [0, 2, 2, 3]
    for s, segment in enumerate(segments):
        alone = decoder.verify([segment], needs)
        begin, end = together.hidden_at[s : s + 2]
        for layer in needs.hidden_layers:
            torch.testing.assert_close(together.hidden[layer][begin:end], alone.hidden[layer], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together.of(s), alone.logits, atol=1e-4, rtol=1e-4)
        begin, end = together.logits_at[s : s + 2]
        assert torch.equal(together.top_k[1][begin:end], alone.top_k[1])


@pytest.mark.parametrize("watched", [(1, 2, 3), (0, 2), (2,), (3,)])
@pytest.mark.parametrize("callback", [None, 0, 1, 2])
def test_whoever_watches_a_layer_sees_it_though_another_drafter_resumes(watched, callback):
    decoder, _ = native.pair("llama2")
    slots = three_rows(decoder)
    segments = [chain(slots[0], [4, 5, 6]), chain(slots[1], [7, 8])]
    plain = decoder.verify(segments, Needs(hidden_layers=(0, 1, 2, 3)))
    segments[0].hidden = decoder.run_layers(segments[:1], 2)
    heard = {}
    counted = Counted(decoder)
    resumed = decoder.verify(
        segments, Needs(hidden_layers=watched, callback_layer=callback, resume_layer=2), heard.__setitem__
    )
    assert list(resumed.hidden) == list(watched)
    assert list(heard) == ([] if callback is None else [callback])
    for layer, states in (*resumed.hidden.items(), *heard.items()):
        torch.testing.assert_close(states, plain.hidden[layer], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(resumed.logits, plain.logits, atol=1e-5, rtol=1e-5)
    below = min([*watched, *heard]) < 2
    assert counted.nodes == ([5, 5, 5] if below else [2, 2, 5])


@pytest.mark.parametrize("family", models.NATIVE)
def test_nobody_sees_the_padding_of_a_forward(family, monkeypatch):
    """Chain and tree, states taken in the middle and brought back; then what is committed is read again."""
    found = []
    for padding in (0, 3):
        decoder, _ = native.pair(family)
        monkeypatch.setattr(Decoder, "_padding", lambda *_, padding=padding: padding)
        slots = three_rows(decoder)
        tree = Segment(slots[1], np.array([7, 8, 9, 8]), np.array([-1, 0, 0, 2]), num_logits=4)
        segments = [chain(slots[0], [4, 5, 6], logits=1), tree]
        heard = []
        needs = Needs(hidden_layers=(1, decoder.num_layers), callback_layer=2)
        first = decoder.verify(segments, needs, lambda _, states, heard=heard: heard.append(states))
        tree.hidden = decoder.run_layers([tree], 2)
        resumed = decoder.verify(segments, Needs(resume_layer=2))
        decoder.commit(slots[1], [0, 2, 3])
        after = decoder.verify([chain(slots[1], [5, 6])])
        found.append([first.logits, *first.hidden.values(), *heard, tree.hidden, resumed.logits, after.logits])
        assert first.hidden_at == [0, 3, 7]
        for slot in slots:
            decoder.drop_row(slot)
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, atol=3e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="only its kernels are made to measure")
def test_forwards_are_padded_where_there_is_room():
    decoder, _ = native.pair("llama2", torch.bfloat16)
    if decoder.same_on_any_threads:
        pytest.skip("without AMX all products are ours, which need no padding")
    slot = decoder.add_row(1)
    assert decoder._plan([chain(slot, [4] * 5)]).padding == (0 if decoder._own_nodes else 1)
    decoder._own_nodes = 0  # as where a weight is too large to be kept twice
    assert decoder._plan([chain(slot, [4] * 5)]).padding == 1
    assert decoder._plan([chain(slot, [4])]).padding == 0
    other = decoder.add_row(1)
    assert decoder._plan([chain(s, [4]) for s in (slot, other, *[slot] * 3)]).padding == 0, "rows without drafts"
    assert decoder._plan([chain(slot, [4] * 2), chain(other, [4] * 3)]).padding == 1
    left = decoder.max_context
    while left > 5:
        part = min(left - 5, 60)
        decoder.verify([chain(slot, [4] * part)])
        decoder.commit(slot, range(part))
        left -= part
    assert decoder._plan([chain(slot, [4] * 5)]).padding == 0
    assert decoder.verify([chain(slot, [4] * 5)]).logits.shape == (5, decoder.vocab_size)


def test_a_self_drafter_may_bring_its_states_in_another_dtype():
    decoder, _ = native.pair("llama2", torch.bfloat16)
    slots = three_rows(decoder)
    segments = [chain(slots[0], [4, 5, 6]), chain(slots[1], [7, 8])]
    plain = decoder.verify(segments).logits
    segments[0].hidden = decoder.run_layers(segments[:1], 2).float()
    resumed = decoder.verify(segments, Needs(resume_layer=2)).logits
    assert resumed.dtype == torch.float32
    torch.testing.assert_close(resumed.float(), plain.float(), atol=0.06 * float(plain.std()), rtol=0)


def test_the_head_over_hidden_states_of_any_dtype_gives_the_logits():
    decoder, _ = native.pair("llama2")
    slot = decoder.add_row(1)
    verdict = decoder.verify([chain(slot, [4, 5, 6])], Needs(hidden_layers=(3,)))
    assert torch.equal(decoder.logits(verdict.hidden[3], normalise=False), verdict.logits)
    raw = decoder.run_layers([chain(slot, [4, 5, 6])], 3)
    torch.testing.assert_close(decoder.logits(raw), verdict.logits, atol=1e-5, rtol=1e-5)
    half, _ = native.pair("llama2", torch.bfloat16)
    for normalise in (True, False):
        assert torch.equal(half.logits(raw, normalise), half.logits(raw.bfloat16(), normalise))


def test_a_trimmed_cache_has_the_first_layers_and_others_run_on_their_own():
    decoder, _ = native.pair("llama2")
    whole = decoder.run_layers([chain(decoder.add_row(1), [4, 5, 6])], 3)
    first, rest = decoder.new_cache(1, 0), decoder.new_cache(2)
    decoder.cache = first
    assert (first.kv.shape[0], rest.kv.shape[0]) == (1, 2)
    segment = chain(decoder.add_row(1), [4, 5, 6])
    assert rest.add_row(1) == segment.slot
    segment.hidden = decoder.run_layers([segment], 1)
    torch.testing.assert_close(decoder.run_layers([segment], 3, first=1, cache=rest), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_is_none_the_worse_for_the_nan_of_an_earlier_row(dtype):
    decoder, _ = native.pair("llama2", dtype)
    slot = decoder.add_row(1)
    fresh = decoder.verify([chain(slot, [3, 4, 5])]).logits
    weight = decoder.embedding[7].clone()
    decoder.embedding[7] = float("nan")
    broken = decoder.verify([chain(slot, [7] * 40)]).logits
    decoder.embedding[7] = weight
    assert broken.isnan().all()
    decoder.drop_row(slot)
    assert decoder.add_row(1) == slot
    assert torch.equal(decoder.verify([chain(slot, [3, 4, 5])]).logits, fresh)


def test_a_forward_that_wants_no_logits():
    decoder, _ = native.pair("llama2", torch.bfloat16)
    slots = [decoder.add_row(1) for _ in range(2)]
    verdict = decoder.verify([chain(slot, [3, 4, 5], logits=0) for slot in slots], Needs(top_k=3, hidden_layers=(1,)))
    assert verdict.top_k is not None
    assert (verdict.logits.shape, verdict.top_k[0].shape) == ((0, models.VOCAB_SIZE), (0, 3))
    assert verdict.hidden[1].shape == (6, decoder.hidden_size)


def test_verifying_commits_nothing():
    decoder, _ = native.pair("llama2")
    slots = three_rows(decoder)
    segments = [chain(slot, [3, 4, 5]) for slot in slots]
    first = decoder.verify(segments).logits.clone()
    decoder.verify([chain(slot, [9, 9, 9, 9]) for slot in slots[::-1]])
    torch.testing.assert_close(decoder.verify(segments).logits, first, atol=1e-5, rtol=1e-5)
    assert [decoder.length(slot) for slot in slots] == [9, 33, 1]


@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3", "mistral-window"])
def test_bfloat16_trees_agree_with_float32(family):
    half, model = native.pair(family, torch.bfloat16)
    single = native.of(model)
    rng = np.random.default_rng(9)
    pasts, tokens = [text(rng, n) for n in (9, 33, 1)], text(rng, 6)
    out = []
    for decoder in (half, single):
        slots = [decoder.add_row(1) for _ in pasts]
        for slot, past in zip(slots, pasts, strict=True):
            decoder.verify([chain(slot, past)])
            decoder.commit(slot, range(len(past)))
        segments = [Segment(slot, np.array(tokens), PARENT, num_logits=6) for slot in slots]
        out.append(decoder.verify(segments).logits.float())
    assert half.logits(torch.zeros(1, half.hidden_size, dtype=torch.bfloat16)).dtype == torch.float32
    error = (out[0] - out[1]).std() / out[1].std()
    assert error < 0.03, f"bfloat16 is off by {error:.1%} of the logits' spread"


@pytest.mark.skipif(not kernels.preferred(), reason="oneDNN chooses a kernel by the number of rows")
@pytest.mark.parametrize("past", [5, 70, 190, 250, 500])
def test_in_bfloat16_a_token_is_the_same_alone_and_in_a_draft(demo, past):
    decoder = load(demo, dtype="bfloat16", device="cpu")
    rng = np.random.default_rng(past)
    before, draft = rng.integers(2, decoder.vocab_size, past).tolist(), rng.integers(2, decoder.vocab_size, 12).tolist()
    slot = decoder.add_row(1)
    decoder.verify([chain(slot, before)])
    decoder.commit(slot, range(past))
    alone = decoder.verify([chain(slot, draft[:1])]).logits
    for nodes in (2, 3, 5, 8, 12):
        assert torch.equal(decoder.verify([chain(slot, draft[:nodes])]).logits[:1], alone), nodes
