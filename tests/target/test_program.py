"""Recorded forwards: the same bits as the same layers called one by one, whatever changes between forwards."""

import ctypes
from array import array
from threading import Thread

import numpy as np
import pytest
import torch
from numba import carray, cfunc
from tests import exact, models, native

from paceline import kernels
from paceline.compiled import address, fetch_add
from paceline.core.segment import Segment
from paceline.formats.facts import BEFORE_NORM
from paceline.kernels import amx, program
from paceline.kernels.linear import MAX_ROWS_OWN, SMALL, Linear
from paceline.kernels.ops import ALL_ROWS
from paceline.kernels.products import Panels
from paceline.target.base import Needs

NEEDS = Needs(hidden_layers=(1, BEFORE_NORM))


def made(kind, **shape):
    """A decoder whose products are ours: in blocks, or exact."""
    dtype = torch.float32 if "float32" in kind else torch.bfloat16
    target = native.of(models.model("qwen3-bias", **shape), dtype, precision="int8" if "int8" in kind else None)
    if "exact" in kind:
        target.make_exact()
    return target


def story(target):
    """Logits and states of forwards of rows that come and go, while the cache grows."""
    rng, results = np.random.default_rng(0), []
    slots = exact.prepared(target, [rng.integers(4, 300, n).tolist() for n in (3, 40, 64)])
    for turn in range(12):
        if turn == 6:
            slots.append(target.add_row(100))
        segments = []
        for slot in slots[turn % 2 :]:
            parents = [-1, *(int(rng.integers(i)) for i in range(1, int(rng.integers(1, 5))))]
            segments.append(exact.tree(slot, rng.integers(4, 300, len(parents)).tolist(), parents))
        verdict = target.verify(segments, NEEDS)
        results += [verdict.logits, *(verdict.hidden[layer] for layer in NEEDS.hidden_layers)]
        for segment in segments:
            target.commit(segment.slot, [0])
    return results


@pytest.mark.usefixtures("threads", "level")
@pytest.mark.parametrize("kind", ["int8", "int8-float32", "exact", "exact-float32", "exact-int8"])
def test_has_the_bits_of_its_layers_called_one_by_one(kind, monkeypatch):
    if kind == "exact" and not kernels.supported(torch.bfloat16):
        pytest.skip("exact products of bfloat16 are torch's without AVX-512 BF16, and are not recorded")
    target = made(kind)
    found = story(target)
    assert target._programs is not None
    assert any(target._programs._programs.values()), "nothing was recorded"
    monkeypatch.setattr(program, "MOST_ROWS", 0)
    for one, other in zip(found, story(made(kind)), strict=True):
        assert torch.equal(one, other)


def test_states_before_layers_are_taken_inside_one_recorded_forward():
    target = made("int8")
    slot = target.add_row(8)
    taken = target.verify([exact.tree(slot, [5], [-1])], NEEDS).hidden
    assert len(target._programs._programs) == 1
    before = taken[1].clone()
    target.verify([exact.tree(slot, [6], [-1])], NEEDS)
    assert torch.equal(taken[1], before), "the next forward changes nothing that was returned"


def test_a_layer_in_which_torch_computes_is_not_recorded(monkeypatch):
    target = made("int8")
    layer = target.layers[1]
    monkeypatch.setattr(layer.mlp, "gate_up", lambda x, product=layer.mlp.gate_up: product(x).clone())
    slot, other = target.add_row(8), made("int8")
    logits = target.verify([exact.tree(slot, [5], [-1])]).logits
    assert list(target._programs._programs.values()) == [None]
    assert torch.equal(logits, other.verify([exact.tree(other.add_row(8), [5], [-1])]).logits)


def test_recording_a_forward_does_not_go_through_torchs_compiler():
    """Torch wraps the method of a mode in a call that imports the compiler, which takes a second."""
    assert not hasattr(program._Watch.__torch_dispatch__, "__wrapped__")


def test_many_rows_of_a_prompt_do_not_change_a_recorded_forward():
    """A forward that is not recorded, between two that are, must not write into their memory."""
    target = made("int8")
    slot, other = exact.prepared(target, [[5, 6, 7], [9]])
    one = target.verify([exact.tree(slot, [5], [-1])]).logits
    target.verify([Segment.chunk(other, np.arange(4, 84), last=True)])
    assert torch.equal(target.verify([exact.tree(slot, [5], [-1])]).logits, one)


@pytest.mark.parametrize("kind", ["int8, bfloat16", "bfloat16, exact"])
@pytest.mark.parametrize("nodes", [program.MOST_ROWS - 1, program.MOST_ROWS])
def test_the_most_rows_of_a_call_are_those_of_layers_one_by_one(kind, nodes):
    """From 32 rows on, blocks are multiplied in another way on AMX, which packs the rows anew."""
    target = made(kind, hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    (slot,) = exact.prepared(target, [[*range(5, 45)]])
    tree = exact.tree(slot, [*range(50, 50 + nodes)], [-1, *range(nodes - 1)])
    recorded = [target.verify([tree]).logits for _ in range(2)]
    target._programs.run = lambda *_: None
    assert torch.equal(target.verify([tree]).logits, recorded[0])
    assert torch.equal(recorded[1], recorded[0])


@pytest.mark.parametrize("copied", [lambda x: x.t().contiguous(), lambda x: x.t().reshape(-1), lambda x: x + 1])
def test_layers_in_which_torch_copies_are_not_recorded(copied):
    """Torch calls `contiguous` a view, also where it copies; what it copied while recording would be read for ever."""
    target = made("bfloat16, exact")
    (slot,) = exact.prepared(target, [[5, 6, 7]])
    writer = target.cache.writer(target._plan([exact.tree(slot, [8, 9], [-1, 0])]))

    def step(layer, x, delta):
        return copied(x), x

    with torch.inference_mode():
        x = torch.ones(2, 4)
        assert program.Programs().run(step, range(1), 0, x, writer) is None
        assert program.Programs().run(lambda _, x, __: (x.view(4, 2).view(2, 4), x), range(1), 0, x, writer) is not None


@cfunc("void(voidptr)")
def _pieces(at):
    """A step of 16 pieces: each notes how many pieces of the step before are done, and that it was run itself."""
    task = carray(at, (3,), np.int64)
    done, before = carray(address(task[1]), (17,), np.int64), carray(address(task[2]), (17,), np.int64)
    while True:
        piece = fetch_add(task, 1)
        if piece >= 16:
            return
        ready = 0
        for other in range(16):
            ready += before[other]
        done[piece] += ready // 16
        fetch_add(done[16:], 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_begins_when_all_pieces_before_it_are_done_and_waits_for_no_thread(threads):
    """Any number of threads may come, at any time: each piece is run once, with what the last step wrote."""
    done = np.zeros((401, 17), np.int64)
    done[0, :16] = 1
    row = done.strides[0]
    lines, tasks = np.zeros((400, program.WORDS), np.int64), np.zeros((400, 3), np.int64)
    for step in range(400):
        tasks[step, 1:] = done.ctypes.data + (step + 1) * row, done.ctypes.data + step * row
        lines[step, 1:3] = _pieces.address, tasks.ctypes.data + step * tasks.strides[0]
    task = array("q", (0, lines.ctypes.data, len(lines), program._let_others_run()))
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(program._run.address)
    workers = [Thread(target=run, args=(task.buffer_info()[0],)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert (done[:, :16] == 1).all()


def test_small_weights_beside_onednn_are_one_call_for_few_rows():
    """Layers of small weights are recorded, and a node's bits are the same among up to MAX_ROWS_OWN."""
    if not amx.supported():
        pytest.skip("only beside oneDNN on AMX")
    target = made("bfloat16")
    slot = target.add_row(100)
    tokens, parents = [*range(5, 5 + MAX_ROWS_OWN)], [-1, *range(MAX_ROWS_OWN - 1)]
    forwards = [exact.tree(slot, tokens[:count], parents[:count]) for count in (MAX_ROWS_OWN, 2, 17)]
    most, *fewer = (target.verify([one]).logits for one in forwards)
    assert len(target._programs._programs) == 2
    assert all(target._programs._programs.values())
    for logits in fewer:
        assert torch.equal(logits, most[: len(logits)])


def test_which_weights_are_kept_for_few_rows():
    small, large = (Linear(torch.ones(count, 64, dtype=torch.bfloat16)) for count in (96, SMALL // 128 + 32))
    assert (small.product.own_rows == MAX_ROWS_OWN) == amx.supported()
    assert large.product.own_rows in (0, ALL_ROWS)
    if amx.supported():
        x = torch.randn(MAX_ROWS_OWN + 1, 64).bfloat16()
        assert torch.equal(small(x[:MAX_ROWS_OWN]), Panels(small.dense())(x[:MAX_ROWS_OWN]))
        small.product.few = None
        assert torch.equal(small(x), Linear(small.dense())(x))
