"""Integer panels: right against whole numbers, the same for one row as for many, with and without VNNI."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from paceline.target.kernels import integer, products
from paceline.target.kernels.integer import COLUMNS, ROWS, IntegerPanels
from paceline.target.linear import BlockLinear, Linear, linear
from paceline.target.quantised.blocks import KINDS, Q4_0, Q4_K, Q6_K, Q8_0, Blocks, Kind, quantise

pytestmark = pytest.mark.skipif(not integer.supported(), reason="this CPU has no float16 conversion")

SCALES = {Q4_K: (0, 2), Q6_K: (208,)}
"""Where a block's float16 scales are; at 0 in the others."""


def random_blocks(kind: Kind, outputs: int, width: int, seed: int = 0) -> Blocks:
    """Any codes, with scales of ordinary size and either sign."""
    generator = torch.Generator().manual_seed(seed)
    size = (outputs, width // kind.inputs, kind.nbytes)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    for at in SCALES.get(kind, (0,)):
        scale = 0.02 * torch.rand(*size[:2], 1, generator=generator) - 0.01
        blocks[..., at : at + 2] = scale.half().view(torch.uint8)
    return Blocks(kind, blocks.flatten(1))


def random(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as the kernel sees it: whole numbers -127 to 127 by 32 inputs, times a float32 scale; float64."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    numbers = torch.where(scale > 0, blocks / scale, 0).round()
    return (numbers.double() * scale.double()).flatten(-2)


def check(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """`out` is rounded(x) @ weight.T + bias, but for what float32 sums are off by, and one rounding to its dtype."""
    exact, size = rounded(x) @ weight.double().T, rounded(x).abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    last = 2.0**-8 if out.dtype == torch.bfloat16 else 0.0
    assert bool(((out.double() - exact).abs() <= 1e-6 * size + last * 1.01 * exact.abs()).all())


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction, where this CPU has it, and the way of all others."""
    if request.param and not integer.fast():
        pytest.skip("this CPU has no AVX-512 VNNI")
    monkeypatch.setattr(integer, "fast", lambda: request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "blocks"), [(COLUMNS, 1), (1, 2), (45, 3), (200, 12)])
def test_is_the_product_with_x_rounded(kind: Kind, dtype: torch.dtype, outputs: int, blocks: int) -> None:
    if not integer.fast() and (outputs, dtype) == (COLUMNS, torch.bfloat16):
        pytest.skip("the way of all CPUs is slow; the other sizes show it")
    weight, bias = random_blocks(kind, outputs, blocks * kind.inputs), random(1, outputs)
    for rows in (1, 2, ROWS + 1):
        x = random(2, rows, weight.shape[1]).to(dtype)
        check(IntegerPanels([weight], bias)(x), x, weight.dense(), bias)
        check(IntegerPanels([weight])(x), x, weight.dense())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_alone_and_among_others(kind: Kind, threads: int) -> None:
    x, panels = random(3, 40, 768), IntegerPanels([random_blocks(kind, 100, 768)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([panels(x[i : i + 1]) for i in range(len(x))])
        # Both ways deal rows out alike, so the slow one need only show every size of a tile.
        counts = range(1, len(x) + 1) if integer.fast() else (*range(1, ROWS + 2), 2 * ROWS + 3, len(x))
        for rows in counts:
            assert torch.equal(panels(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not integer.fast(), reason="this CPU has no AVX-512 VNNI")
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_both_ways_give_the_same_bits(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    x, panels = 100 * random(4, 14, 512), IntegerPanels([random_blocks(kind, 33, 512)])
    quick = panels(x)
    monkeypatch.setattr(integer, "fast", lambda: False)
    assert torch.equal(panels(x), quick)


def test_the_largest_sums_do_not_overflow() -> None:
    weight, x = quantise(torch.full((16, 256), -1.0), Q8_0), torch.full((1, 256), 3.0)
    assert torch.allclose(IntegerPanels([weight])(x), torch.full((1, 16), -768.0), rtol=1e-3)


def test_parts_of_several_kinds_are_one_product() -> None:
    parts = [random_blocks(kind, 20, 512, seed) for seed, kind in enumerate((Q4_K, Q4_K, Q6_K, Q8_0, Q4_0))]
    bias, x = random(5, 100), random(6, 7, 512)
    panels, dense = IntegerPanels(parts, bias), torch.cat([part.dense() for part in parts])
    check(panels(x), x, dense, bias)
    assert torch.equal(torch.cat([part.dense() for part in panels.blocks()]), dense)
    assert panels.nbytes == sum(part.nbytes for part in parts)
    few = torch.tensor([99, 0, 45, 20, 44])
    assert torch.equal(torch.cat([part.dense() for part in panels.rows(few)]), dense[few])
    assert torch.equal(IntegerPanels(panels.rows(few), bias[few])(x), panels(x)[:, few])


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_the_bytes_come_back(kind: Kind) -> None:
    blocks = Blocks(kind, torch.randint(0, 256, (75, 5 * kind.nbytes), dtype=torch.uint8))
    panels, few = IntegerPanels([blocks]), torch.tensor([74, 0, 16, 31])
    assert torch.equal(panels.blocks()[0].data, blocks.data)
    assert torch.equal(panels.rows(few)[0].data, blocks.data[few])


@pytest.mark.usefixtures("way")
def test_what_is_not_a_number_stays_so() -> None:
    x, panels = random(7, 4, 96), IntegerPanels([random_blocks(Q8_0, 40, 96)])
    x[1, 5], x[2, 90] = torch.nan, torch.inf
    out = panels(x)
    assert bool(out[1:3].isnan().all())
    assert bool(out[[0, 3]].isfinite().all())


@pytest.mark.usefixtures("way")
def test_zeros_and_the_smallest_numbers_are_no_trouble() -> None:
    x, panels = torch.zeros(3, 64), IntegerPanels([random_blocks(Q4_0, 16, 64)])
    x[1], x[2] = 1e-45, 1e-38
    assert bool((panels(x).abs() < 1e-36).all())


def test_nothing_is_written_after_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, panels, x = torch.full((9, 45), 7.0), IntegerPanels([random_blocks(Q8_0, 45, 64)]), random(8, 5, 64)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_: memory[2:7])
    panels(x)
    monkeypatch.undo()
    assert bool((memory[:2] == 7).all())
    assert bool((memory[7:] == 7).all())
    assert not bool((memory[2:7] == 7).any())


def test_where_torch_has_another_openmp_one_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, panels = random(11, 5, 64), IntegerPanels([random_blocks(Q8_0, 40, 64)])
    right = panels(x)
    monkeypatch.setattr(products, "parallel", lambda: None)
    monkeypatch.setattr(integer, "product_of", cache(integer.product_of.__wrapped__))
    assert "GOMP_parallel(ptr @work" not in integer._source(Q8_0, torch.float32, True)
    assert torch.equal(panels(x), right)


def test_no_rows_give_no_rows() -> None:
    assert IntegerPanels([random_blocks(Q8_0, 40, 64)])(torch.empty(0, 64)).shape == (0, 40)


def test_a_linear_keeps_blocks_where_they_can_be_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, bias, x = [random_blocks(Q8_0, 20, 64), random_blocks(Q4_0, 12, 64)], random(9, 32), random(10, 5, 64)
    made = linear(parts, bias, torch.float32)
    assert isinstance(made, BlockLinear)
    assert made.exact() is made
    dense = torch.cat([part.dense() for part in parts])
    assert torch.equal(made.dense(), dense)
    few = torch.tensor([31, 2])
    assert torch.equal(made.rows(few)(x), made(x)[:, few])
    mixed = linear([parts[0], dense[20:]], bias, torch.float32)
    assert torch.allclose(mixed(x), x @ dense.T + bias, atol=1e-5)
    assert type(linear(parts, bias, torch.float16)) is Linear
    monkeypatch.setattr(integer, "supported", lambda: False)
    plain = linear(parts, bias, torch.float32)
    assert type(plain) is Linear
    assert torch.allclose(plain(x), x @ dense.T + bias, atol=1e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", [Q8_0, Q4_K], ids=lambda kind: kind.name)
def test_bfloat16_is_float32_rounded_to_the_nearest(kind: Kind) -> None:
    """Also where the CPU has no instruction for it."""
    panels = IntegerPanels([random_blocks(kind, 45, 8 * kind.inputs)])
    x = random(3, 40, panels.width).to(torch.bfloat16)
    x[1] *= 1e30
    x[2, 5], x[3, 5] = float("nan"), float("inf")
    expected = panels(x.float()).to(torch.bfloat16)
    assert torch.equal(panels(x).nan_to_num(7.0), expected.nan_to_num(7.0))
