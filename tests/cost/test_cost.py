"""The cost model: limits, and tables of figures worked out elsewhere."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import models

from paceline.cost.model import (
    DEVICES,
    Device,
    Machine,
    Rounds,
    Size,
    chain_tokens,
    forward_seconds,
    memory_bound_speedup,
    predict,
    round_cost,
    speedup,
)

VICUNA_7B = Size(6.61e9, layers=32, width=4096, cache_bytes=2 * 32 * 4096 * 2)
LLAMA_8B = Size(7.505e9, layers=32, width=4096, cache_bytes=2 * 32 * 1024 * 2)

# Tokens per round --------------------------------------------------------------------------------------------


def test_tokens_of_a_chain() -> None:
    assert chain_tokens([]) == chain_tokens([0.0] * 5) == 1
    assert chain_tokens([1.0] * 5) == 6
    assert chain_tokens([0.8] * 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert chain_tokens([0.5, 0.25]) == 1 + 0.5 + 0.125


# Speed-up -----------------------------------------------------------------------------------------------------


def test_limits() -> None:
    for rate in (0.0, 0.4, 1.0):
        tokens = chain_tokens([rate] * 5)
        assert speedup(tokens) == memory_bound_speedup(tokens, 0, 0, 1e9) == tokens
    assert speedup(3.0, verify=1.2, calls=5, call=0.1, overhead=0.05) == pytest.approx(3 / 1.75)
    assert memory_bound_speedup(3.0, 5, 1e8, 1e9) == pytest.approx(2.0)
    assert round_cost(3.0, 1.5) == 2.0


# Forwards ----------------------------------------------------------------------------------------------------


def test_a_forward_reads_or_computes() -> None:
    machine = Machine(Device("toy", 1e9, 1e12, 1e9), bandwidth_share=1, compute_share=1)
    size = Size(1e6, layers=2, width=10, cache_bytes=100)
    assert forward_seconds(size, machine, 1) == pytest.approx(2e-3, rel=1e-6)
    assert forward_seconds(size, machine, 1e5) == pytest.approx(0.2, rel=1e-6)
    ridge = forward_seconds(size, machine, 1000)
    assert ridge == pytest.approx(2e-3 * 2**0.25)
    assert forward_seconds(size, machine, 1, batch=1000) == ridge
    with_cache = forward_seconds(size, machine, 1, batch=3, context=1000)
    assert with_cache - forward_seconds(size, machine, 3) == pytest.approx(3e5 / 1e9)


@given(st.floats(1, 500), st.floats(0, 500), st.integers(1, 64), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_more_tokens_never_take_less_time(nodes: float, more: float, batch: int, context: int) -> None:
    machine = Machine(DEVICES["A100-80"])
    times = [forward_seconds(LLAMA_8B, machine, n, batch=batch, context=context) for n in (nodes, nodes + more)]
    assert times[0] <= times[1] * (1 + 1e-12)


def test_what_a_forward_reads() -> None:
    """The input embedding is looked up, not read; a head that is tied to it is read, once."""
    for family, tied in (("llama2", False), ("smollm", True), ("qwen3", True), ("qwen2", False)):
        made = models.model(family)
        counted = {id(p): p.numel() for p in made.parameters()}
        embedding = made.get_input_embeddings().weight.numel()
        size = Size.of(made.config)
        assert size.parameters == sum(counted.values()) - (0 if tied else embedding), family
        assert size.bytes == 2 * size.parameters
    assert size.cache_bytes == 2 * 3 * 2 * 16 * 2
    assert (size.layers, size.width) == (3, 64)
    with pytest.raises(ValueError, match="bytes of one parameter"):
        Size(7e9, layers=32, width=4096, cache_bytes=0, weight_bytes=14e9)
    with pytest.raises(ValueError, match="above 0"):
        Size(0, layers=32, width=4096, cache_bytes=0)


# Prediction --------------------------------------------------------------------------------------------------


def looked_up(tokens: float, nodes: int) -> Rounds:
    """A thousand rounds with drafts from a look-up of 0.1 ms."""
    return Rounds(1000 * tokens, {nodes: 1000}, draft_seconds=0.1)


def test_absent_hardware() -> None:
    """Vicuna-7B with prompt lookup (1.75 tokens a round) and token recycling (2.73, 80 nodes), worked out by hand."""
    devices = ("RTX-3090", "A100-80", "H100-SXM", "H200", "L4", "AGX-Orin")
    machines = [Machine(DEVICES[name], compute_share=0.6) for name in devices]
    steps = [1e3 * (forward_seconds(VICUNA_7B, machine, 1) + machine.step) for machine in machines]
    assert [f"{ms:.2g}" for ms in steps] == ["18", "8.4", "5.2", "3.7", "55", "81"]
    copied = [predict(looked_up(1.75, 11), VICUNA_7B, machine).speedup for machine in machines]
    assert copied == pytest.approx([1.72, 1.69, 1.66, 1.62, 1.74, 1.74], abs=0.0055)
    recycled = [predict(looked_up(2.73, 80), VICUNA_7B, machine).speedup for machine in machines]
    assert recycled == pytest.approx([1.82, 2.51, 2.57, 2.49, 2.71, 2.67], abs=0.0055)


def test_a_prediction_has_a_band() -> None:
    machine = Machine(DEVICES["A100-80"])
    found = predict(looked_up(1.75, 11), VICUNA_7B, machine)
    assert (found.low, found.high) == pytest.approx((0.9 * found.speedup, 1.1 * found.speedup))
    for nothing in (Rounds(50, {1: 50}), Rounds(0, {})):
        assert predict(nothing, VICUNA_7B, machine).speedup == pytest.approx(1)


def test_prompt_lookup_of_vicuna_on_an_a100(shared: Path) -> None:
    """Recorded answers replayed, forwards from the datasheet; Spec-Bench's leaderboard has 1.66."""
    from tests.draft.trace import conversations

    from paceline.draft.registry import create
    from paceline.workbench.walk import Tally, replay

    if not (shared / "data" / "traces").is_dir():
        pytest.skip("no recorded generations in the shared data")
    drafter, tally = create("prompt-lookup"), Tally()
    for i, one in enumerate(conversations(shared)):
        for t, turn in enumerate(one.turns):
            replay(drafter, turn, i << 20 | t, tally)
    assert tally.mean_accepted_tokens == pytest.approx(1.737, abs=0.001)
    sizes = {nodes: count for nodes, count in enumerate(tally.sizes.tolist()) if count}
    found = predict(Rounds(tally.new_tokens, sizes, tally.seconds), VICUNA_7B, Machine(DEVICES["A100-80"]))
    print(found)
    assert found.speedup == pytest.approx(1.66, rel=0.10)
