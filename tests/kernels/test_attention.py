"""Attention along paths after long texts: near float64, and the same bits for any rows and threads."""

import numpy as np
import pytest
import torch

from paceline.core.segment import Segment
from paceline.kernels.records import PART
from paceline.target.attention import attend
from paceline.target.cache import RaggedCache
from paceline.target.layout import plan

HEADS = [(6, 1, 128), (4, 2, 80), (3, 3, 8)]
TREE = [-1, 0, 0, 1, 3, 2]
LENGTH = 2 * PART + 130


def filled(heads, kv_heads, dim, dtype):
    """A cache with a row of LENGTH tokens and room for a tree; its slot; queries of the tree's nodes."""
    some = torch.Generator().manual_seed(dim)
    cache = RaggedCache(1, kv_heads, dim, 4 * PART, dtype, "cpu")
    slot = cache.add_row(LENGTH + len(TREE))
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=some))
    cache._lengths[slot] = LENGTH
    return cache, slot, torch.randn(len(TREE), heads, dim, generator=some).to(dtype)


def attended(cache, slot, queries, parents, window=None, sinks=None):
    segment = Segment(slot, np.zeros(len(parents), np.int64), np.array(parents), num_logits=len(parents))
    shared = queries.shape[1] // cache.kv.shape[3]
    kinds = {"dtype": queries.dtype, "shared": shared, "windows": (window,), "most_on_paths": 64}
    layout = plan([segment], [cache.length(slot)], **kinds)
    return attend(queries, cache.kv.shape[3], layout, cache.writer(layout), 0, window, sinks)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, PART + 50])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 6, 6)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_is_near_float64_over_several_parts(heads, kv_heads, dim, window, dtype, sinks):
    sinks = None if sinks is None else sinks[:heads].contiguous()
    cache, slot, queries = filled(heads, kv_heads, dim, dtype)
    out = attended(cache, slot, queries, TREE, window, sinks).view(len(TREE), heads, dim)
    keys, values = cache.kv[0, :, slot].double().repeat_interleave(heads // kv_heads, 1)
    for node in range(len(TREE)):
        path = [node]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        seen = [*range(LENGTH), *(LENGTH + one for one in path)][-window if window else 0 :]
        scores = torch.einsum("hd,hkd->hk", queries[node].double(), keys[:, seen]) / dim**0.5
        beside = torch.full((heads,), -torch.inf) if sinks is None else sinks
        shares = torch.cat([scores, beside[:, None].double()], 1).softmax(1)[:, :-1]
        wanted = torch.einsum("hk,hkd->hd", shares, values[:, seen])
        torch.testing.assert_close(out[node].double(), wanted, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_has_the_same_bits_for_any_threads_and_rows(threads, heads, kv_heads, dim, dtype):
    """With five threads, a key head's parts are spread over them; with one, none are."""
    cache, slot, queries = filled(heads, kv_heads, dim, dtype)
    sinks = torch.linspace(0, 3, heads)
    threads(1)
    alone = attended(cache, slot, queries, TREE)
    held = attended(cache, slot, queries, TREE, sinks=sinks)
    chain = attended(cache, slot, queries, [-1, 0, 1])
    threads(5)
    for _ in range(5):
        assert torch.equal(attended(cache, slot, queries, TREE), alone)
        assert torch.equal(attended(cache, slot, queries, TREE, sinks=sinks), held)
    assert torch.equal(attended(cache, slot, queries[:1], [-1]), alone[:1])
    assert torch.equal(attended(cache, slot, queries[:2], [-1, 0]), chain[:2])
