"""The cost model: limits, brute force beside every rule, and tables of figures worked out elsewhere."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import models

from paceline.cost.model import (
    DEVICES,
    Device,
    Length,
    Machine,
    Rounds,
    Size,
    best_chain,
    best_tree,
    chain_tokens,
    dynamic_lengths,
    fit_round_cost,
    forward_seconds,
    full_tree_tokens,
    interpolate,
    memory_bound_speedup,
    optimal_length,
    predict,
    round_cost,
    speedup,
    speedup_from_rounds,
)

VICUNA_7B = Size(6.61e9, layers=32, width=4096, cache_bytes=2 * 32 * 4096 * 2)
LLAMA_8B = Size(7.505e9, layers=32, width=4096, cache_bytes=2 * 32 * 1024 * 2)

SHARED_RATES = st.lists(st.floats(0, 1), min_size=64, max_size=64).map(lambda rates: sorted(rates, reverse=True))
COSTS = st.floats(0, 0.6)


def shown(text: str) -> list[str]:
    return text.split()


# Tokens per round --------------------------------------------------------------------------------------------


def test_tokens_of_a_chain() -> None:
    assert chain_tokens([]) == chain_tokens([0.0] * 5) == 1
    assert chain_tokens([1.0] * 5) == 6
    assert chain_tokens([0.8] * 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert chain_tokens([0.5, 0.25]) == 1 + 0.5 + 0.125


def test_tokens_of_a_full_tree() -> None:
    assert full_tree_tokens([0.6], 4) == pytest.approx(chain_tokens([0.6] * 4))
    assert full_tree_tokens([0.6, 0.14], 2) == pytest.approx(1 + 0.74 + 0.74**2)


# A drafter whose best guess is right 60 (80) % of the time. Of the first list the guesses from the sixth on are ours:
# they decide the last digit at 64 and 128 nodes.
POOR = [0.60, 0.14, 0.07, 0.04, 0.025, 0.018, 0.014, 0.011]
GOOD = [0.80, 0.09, 0.03]


def test_best_trees() -> None:
    trees = [best_tree(POOR, nodes) for nodes in (4, 8, 16, 32, 64, 128)]
    assert [f"{tree.tokens:.2f}" for tree in trees] == shown("2.32 2.69 3.08 3.47 3.87 4.27")
    assert [tree.depth for tree in trees] == [3, 5, 6, 7, 9, 10]
    chains = [f"{chain_tokens([0.6] * nodes):.2f}" for nodes in (4, 8, 16, 32, 64, 128)]
    assert chains == shown("2.31 2.47 2.50 2.50 2.50 2.50")
    better = [f"{best_tree(GOOD, nodes).tokens:.2f}" for nodes in (4, 8, 16, 32, 64)]
    assert better == shown("3.36 4.33 5.02 5.69 6.39")
    chains = [f"{chain_tokens([0.8] * nodes):.2f}" for nodes in (4, 8, 16, 32, 64)]
    assert chains == shown("3.36 4.33 4.89 5.00 5.00")


@given(st.lists(st.floats(0.01, 0.6), min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_no_tree_of_so_many_nodes_is_better(ranks: list[float], nodes: int) -> None:
    def grow(tree: frozenset[tuple[int, ...]], left: int) -> set[frozenset[tuple[int, ...]]]:
        if not left:
            return {tree}
        open_ends = {(*path, r) for path in {(), *tree} for r in range(len(ranks))} - tree
        return {done for end in open_ends for done in grow(tree | {end}, left - 1)}

    def tokens(tree: frozenset[tuple[int, ...]]) -> float:
        return 1 + sum(float(np.prod([ranks[r] for r in path])) for path in tree)

    shapes = {frozenset()}
    for _ in range(nodes):
        shapes = {done for tree in shapes for done in grow(tree, 1)}
    found = best_tree(ranks, nodes)
    assert found.tokens == pytest.approx(max(map(tokens, shapes)))
    assert len(found.parent) == nodes
    assert all(above <= i for i, above in enumerate(found.parent))


# Speed-up and draft length -----------------------------------------------------------------------------------


def test_limits() -> None:
    for rate in (0.0, 0.4, 1.0):
        tokens = chain_tokens([rate] * 5)
        assert speedup(tokens) == memory_bound_speedup(tokens, 0, 0, 1e9) == tokens
    assert optimal_length([0.0] * 64, call=0.0) == Length(0, 1.0)
    assert optimal_length([1.0] * 64, call=0.0) == Length(64, 65.0)
    assert optimal_length([], call=0.1) == Length(0, 1.0)
    assert speedup(3.0, verify=1.2, calls=5, call=0.1, overhead=0.05) == pytest.approx(3 / 1.75)
    assert memory_bound_speedup(3.0, 5, 1e8, 1e9) == pytest.approx(2.0)
    assert round_cost(3.0, 1.5) == 2.0


BEST_LENGTHS = {
    0.4: "4/1.51 3/1.49 3/1.45 2/1.36 2/1.25 1/1.18 1/1.13 1/1.04 0/1.00",
    0.5: "5/1.78 4/1.75 4/1.68 3/1.55 2/1.40 2/1.30 1/1.21 1/1.12 0/1.00",
    0.6: "6/2.17 6/2.11 5/2.02 4/1.82 3/1.60 2/1.45 2/1.35 1/1.19 1/1.04",
    0.7: "8/2.78 8/2.69 7/2.53 5/2.21 4/1.89 3/1.68 3/1.53 2/1.33 1/1.10",
    0.8: "12/3.91 11/3.73 10/3.44 7/2.87 6/2.34 5/2.02 4/1.80 3/1.51 2/1.19",
    0.9: "21/6.70 19/6.23 17/5.52 12/4.26 9/3.22 8/2.65 6/2.28 5/1.82 3/1.34",
}


@pytest.mark.parametrize("rate", BEST_LENGTHS)
def test_best_lengths(rate: float) -> None:
    calls = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    found = [optimal_length([rate] * 64, call=call, step=0.01, overhead=0.03) for call in calls]
    assert [f"{best.length}/{best.speedup:.2f}" for best in found] == shown(BEST_LENGTHS[rate])


@given(SHARED_RATES, COSTS, st.floats(0, 0.1), st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_the_marginal_rule_finds_the_best_length(rates: list[float], call: float, step: float, overhead: float) -> None:
    gains = [1.0] + [
        speedup(chain_tokens(rates[:n]), verify=1 + n * step, calls=n, call=call, overhead=overhead)
        for n in range(1, 65)
    ]
    found = optimal_length(rates, call=call, step=step, overhead=overhead, worth=1.0)
    assert found.speedup == pytest.approx(max(gains), abs=1e-9)
    assert gains[found.length] == pytest.approx(found.speedup)
    worth = optimal_length(rates, call=call, step=step, overhead=overhead)
    assert worth == (found if found.speedup >= 1.02 else Length(0, 1.0))


@given(SHARED_RATES, COSTS, COSTS, st.integers(0, 63), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_dearer_never_gains_and_likelier_never_loses(
    rates: list[float], call: float, more: float, at: int, share: float
) -> None:
    one, dear = (optimal_length(rates, call=c, overhead=0.03) for c in (call, call + more))
    assert dear.speedup <= one.speedup + 1e-12
    assert dear.length <= one.length
    assert optimal_length(rates, call=call, overhead=0.03 + more).speedup <= one.speedup + 1e-12
    assert optimal_length(rates, call=call, step=more, overhead=0.03).speedup <= one.speedup + 1e-12
    likelier = rates.copy()
    likelier[at] += share * ((rates[at - 1] if at else 1.0) - rates[at])
    assert optimal_length(likelier, call=call, overhead=0.03).speedup >= one.speedup - 1e-12


def test_knowing_the_kind_of_a_round_beforehand() -> None:
    """Gain over the best single length, which is small when rounds are alike and large when they are of two kinds."""

    def gain(rates: tuple[float, float], shares: tuple[float, float], call: float) -> str:
        kinds = [[rate] * 200 for rate in rates]
        found = dynamic_lengths(kinds, shares, call=call, overhead=0.03)
        fixed = [
            sum(s * chain_tokens(kind[:n]) for s, kind in zip(shares, kinds, strict=True)) / (1.03 + n * call)
            for n in range(1, 200)
        ]
        return f"{found.rate / max(*fixed, 1.0) - 1:.0%}"

    half = (0.5, 0.5)
    assert [gain(rates, half, 0.11) for rates in ((0.8, 0.7), (0.9, 0.6), (0.95, 0.5))] == ["1%", "16%", "35%"]
    assert [gain((0.97, 0.4), (0.3, 0.7), call) for call in (0.11, 0.03)] == ["81%", "57%"]
    assert gain((0.95, 0.5), half, 0.03) == "25%"


def test_the_dynamic_policy_is_the_best_of_all() -> None:
    kinds, shares, cost = [[0.9, 0.8, 0.7, 0.2], [0.3, 0.3, 0.1, 0.1]], [0.4, 0.6], 0.15
    rates = [
        sum(s * chain_tokens(k[:n]) for s, k, n in zip(shares, kinds, lengths, strict=True))
        / sum(s * (1 + 0.05 * (n > 0) + n * cost) for s, n in zip(shares, lengths, strict=True))
        for lengths in product(range(5), repeat=2)
    ]
    assert dynamic_lengths(kinds, shares, call=cost, overhead=0.05).rate == pytest.approx(max(rates))
    assert dynamic_lengths([[0.1]], [1.0], call=0.5).lengths == [0]


# Round costs on Spec-Bench's leaderboard ---------------------------------------------------------------------

# Mean accepted tokens and speed-up of Vicuna 7B, 13B and 33B on an A100; what the fit through 7B and 33B gives for
# (draft layers, verification), and the speed-up it predicts for 13B.
LEADERBOARD = {
    "EAGLE": ("3.58/2.10 3.64/2.16 3.39/2.43", 21, 1.04, 2.32),
    "EAGLE-2": ("4.34/2.36 4.43/2.46 4.05/2.59", 19, 1.25, 2.57),
    "Hydra": ("3.26/2.07 3.35/2.20 3.24/2.22", 8, 1.33, 2.20),
    "Medusa": ("2.31/1.71 2.39/1.80 2.33/1.76", 2, 1.29, 1.78),
    "SpS": ("2.28/1.52 2.19/1.54 2.01/1.57", 15, 1.03, 1.56),
    "PLD": ("1.75/1.66 1.67/1.56 1.54/1.40", None, None, 1.56),
    "REST": ("1.82/1.48 1.82/1.38 1.80/1.48", 1, 1.20, 1.49),
    "Lookahead": ("1.64/1.34 1.63/1.30 1.61/1.25", None, None, 1.30),
    "Recycling": ("2.73/2.22 2.73/2.17 2.62/1.83", None, None, 2.07),
    "SAM+EAGLE-2": ("4.58/2.73 4.52/2.77 4.07/2.59", 7, 1.45, 2.77),
}


@pytest.mark.parametrize("method", LEADERBOARD)
def test_two_models_predict_the_one_between(method: str) -> None:
    pairs, draft, verify, predicted = LEADERBOARD[method]
    cells = [tuple(map(float, cell.split("/"))) for cell in pairs.split()]
    small, _, large = (round_cost(*cell) for cell in cells)
    fitted = fit_round_cost((32, 60), (small, large))
    if draft is not None and verify is not None:
        assert fitted[1] == pytest.approx(draft, abs=0.75)
        assert fitted[0] == pytest.approx(verify, abs=0.015)
    gain = cells[1][0] / (fitted[0] + fitted[1] / 40)
    assert gain == pytest.approx(predicted, abs=0.011)
    assert gain == pytest.approx(cells[1][1], rel=0.085)


# Forwards ----------------------------------------------------------------------------------------------------


def test_ridges() -> None:
    """Published peaks over published bandwidths, in tokens."""
    names = ("A100-80", "H100-SXM", "H200", "RTX-3090", "L4", "B200")
    assert [round(DEVICES[name].ridge) for name in names] == [153, 295, 206, 76, 403, 281]


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
    assert forward_seconds(size, Machine.eager(machine.device, 0.01), 1) == pytest.approx(0.02)


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


BATCHES = {
    "RTX-3090": "2.18 2.13 1.82 1.38 1.08 1.02 1.01",
    "A100-80": "2.16 2.19 2.15 1.89 1.47 1.19 1.14",
    "H200": "2.11 2.15 2.16 2.04 1.69 1.33 1.21",
    "H100-SXM": "2.14 2.18 2.22 2.20 1.96 1.59 1.37",
}
LENGTHS = {"RTX-3090": "5 4 3 1 1 1 1", "A100-80": "5 5 4 3 2 1 1", "H100-SXM": "5 5 5 4 3 2 2"}


@pytest.mark.parametrize("device", BATCHES)
def test_speedups_of_batches(device: str) -> None:
    """A draft of a tenth of the weights, with next to no attention; 1,024 tokens of context; a draft call takes the
    host 0.05 ms, and nothing else takes it time."""
    machine = Machine(DEVICES[device], compute_share=0.6, step=0, extra=0, call=0.05e-3)
    draft = Size(LLAMA_8B.parameters / 10, layers=3, width=1, cache_bytes=0)
    found = [
        best_chain(LLAMA_8B, machine, [0.75] * 16, draft, batch=batch, context=1024, worth=1.0)
        for batch in (1, 8, 16, 32, 64, 128, 256)
    ]
    printed = [float(cell) for cell in shown(BATCHES[device])]
    assert [best.speedup for best in found] == pytest.approx(printed, abs=0.0055)
    if device in LENGTHS:
        assert [str(best.length) for best in found] == shown(LENGTHS[device])


def test_batches_are_not_drafted_for_when_it_does_not_pay() -> None:
    machine = Machine(DEVICES["RTX-3090"])
    draft = Size(LLAMA_8B.parameters / 2, layers=16, width=4096, cache_bytes=0)
    assert best_chain(LLAMA_8B, machine, [0.5] * 8, draft, batch=64) == Length(0, 1.0)


# Prediction --------------------------------------------------------------------------------------------------


def test_tables_are_read_between_and_behind_their_entries() -> None:
    assert interpolate([1, 16, 64], [20, 25, 40], [1, 16, 40, 64, 112]) == pytest.approx([20, 25, 32.5, 40, 55])
    assert interpolate([1], [3.0], [1, 50]) == pytest.approx([3, 3])
    assert interpolate([1, 2, 4], [5, 9, 6], 100) == pytest.approx(6)


def test_speedup_of_recorded_rounds() -> None:
    rounds = Rounds(60, {1: 10, 41: 10}, draft_seconds=0.02)
    assert rounds.count == 20
    assert speedup_from_rounds(rounds, lambda nodes: 0.01 + 0 * nodes) == pytest.approx(60 * 0.01 / 0.22)
    assert speedup_from_rounds(rounds, lambda nodes: nodes, drafting=0) == pytest.approx(60 / (10 + 410))
    assert speedup_from_rounds(Rounds(0, {}), lambda nodes: nodes) == 1
    assert speedup_from_rounds(Rounds(50, {1: 50}), lambda nodes: 3 + nodes) == pytest.approx(1)


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
    assert found.cost == pytest.approx(1.75 / found.speedup)
    loose = predict(looked_up(1.75, 11), VICUNA_7B, Machine.eager(DEVICES["A100-80"]))
    assert loose.high / loose.low == pytest.approx(1.2 / 0.8)
    plain = predict(Rounds(50, {1: 50}), VICUNA_7B, machine)
    assert plain.speedup == pytest.approx(1)


def test_draft_calls_are_worked_out_anew() -> None:
    machine = Machine(DEVICES["A100-80"])
    draft = Size(1e9, layers=22, width=2048, cache_bytes=0)
    rounds = Rounds(3000, {6: 1000}, calls=5000)
    found = predict(rounds, VICUNA_7B, machine, draft=draft)
    plain = forward_seconds(VICUNA_7B, machine, 1) + machine.step
    call = forward_seconds(draft, machine, 1) + machine.call
    verify = forward_seconds(VICUNA_7B, machine, 6) + machine.step + machine.extra
    assert found.speedup == pytest.approx(3 * plain / (verify + 5 * call))
    assert predict(rounds, VICUNA_7B, machine).speedup > found.speedup


def test_prompt_lookup_of_vicuna_on_an_a100(shared: Path) -> None:
    """Recorded answers replayed, forwards from the datasheet; Spec-Bench's leaderboard has 1.66."""
    from tests.draft.trace import conversations

    from paceline.cost.replay import rounds
    from paceline.draft.registry import create
    from paceline.replay.walk import Tally, replay

    if not (shared / "data" / "traces").is_dir():
        pytest.skip("no recorded generations in the shared data")
    drafter, tally = create("prompt-lookup"), Tally()
    for i, one in enumerate(conversations(shared)):
        for t, turn in enumerate(one.turns):
            replay(drafter, turn, i << 20 | t, tally)
    assert tally.mean_accepted_tokens == pytest.approx(1.737, abs=0.001)
    found = predict(rounds(tally), VICUNA_7B, Machine(DEVICES["A100-80"]))
    print(found)
    assert found.speedup == pytest.approx(1.66, rel=0.10)
