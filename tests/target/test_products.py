"""Products by panels: right to one rounding, the same for one row as for many, and within their bounds."""

import pytest
import torch

from paceline.target.kernels import products
from paceline.target.kernels.products import COLUMNS, ROWS, Panels
from paceline.target.linear import Linear

ROUNDING = 2.0**-8
"""Half a unit in the last place of bfloat16, relative."""

needs_the_instruction = pytest.mark.skipif(not products.supported(), reason="this CPU has no AVX-512 BF16")


def random(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_the_instruction
@pytest.mark.parametrize("rows", [1, 2, 7, ROWS, ROWS + 1, 3 * ROWS + 5])
@pytest.mark.parametrize(("outputs", "width"), [(COLUMNS, 8), (1, 64), (15, 24), (33, 64), (640, 384)])
def test_is_the_product_rounded_once(rows: int, outputs: int, width: int) -> None:
    x, weight, bias = random(0, rows, width), random(1, outputs, width), random(2, outputs)
    exact = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()  # what sums in float32 are off by
    error = (Panels(weight, bias)(x).double() - exact).abs()
    assert bool((error <= 1.01 * ROUNDING * exact.abs() + 1e-5 * size).all())
    without = (Panels(weight)(x).double() - (exact - bias.double())).abs()
    assert bool((without <= 1.01 * ROUNDING * (exact - bias.double()).abs() + 1e-5 * size).all())


@needs_the_instruction
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_alone_and_among_others(threads: int) -> None:
    x, panels = random(3, 40, 1536), Panels(random(4, 200, 1536))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([panels(x[i : i + 1]) for i in range(len(x))])
        for rows in range(1, len(x) + 1):
            assert torch.equal(panels(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


@needs_the_instruction
def test_columns_of_another_tensor_are_copied_first() -> None:
    x, panels = random(5, 6, 32), Panels(random(6, 64, 16))
    assert torch.equal(panels(x[:, 16:]), panels(x[:, 16:].clone()))


@needs_the_instruction
def test_nothing_is_written_behind_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.full((9, 45), 7.0).bfloat16()
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_: memory[2:7])
    Panels(random(7, 45, 16))(random(8, 5, 16))
    monkeypatch.undo()
    assert bool((memory[:2] == 7).all())
    assert bool((memory[7:] == 7).all())
    assert not bool((memory[2:7] == 7).all())


@needs_the_instruction
def test_no_rows_give_no_rows() -> None:
    assert Panels(random(9, 40, 16))(torch.empty(0, 16).bfloat16()).shape == (0, 40)


@needs_the_instruction
def test_what_is_not_a_number_stays_so() -> None:
    x, weight = random(10, 3, 16), random(11, 40, 16)
    x[1, 5], weight[7, 3] = torch.nan, torch.inf
    out = Panels(weight)(x)
    assert bool(out[1].isnan().all())
    assert bool(out[0, 7].isinf())
    assert bool(out[0, :7].isfinite().all())


@needs_the_instruction
def test_the_weight_comes_back() -> None:
    weight = random(12, 75, 24)
    assert torch.equal(Panels(weight).dense(), weight)


def test_which_weights_fit() -> None:
    assert products.fits(random(13, 5, 16))
    assert not products.fits(random(13, 5, 12))
    assert products.fits(random(13, 5, 12).float())
    assert not products.fits(random(13, 5, 16).half())


@needs_the_instruction
@pytest.mark.parametrize("preferred", [True, False])
def test_a_linear_uses_it_where_it_is_faster(preferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "preferred", lambda dtype: preferred)
    weight, bias, x = random(14, 70, 64), random(15, 70), random(16, 5, 64)
    linear = Linear(weight, bias)
    assert (linear.panels is not None) == preferred
    exact = x.double() @ weight.double().T + bias.double()
    assert bool(((linear(x).double() - exact).abs() <= 2 * ROUNDING * (exact.abs() + 1)).all())
    few = torch.tensor([3, 69, 0])
    exact = exact[:, few]
    assert bool(((linear.rows(few)(x).double() - exact).abs() <= 2 * ROUNDING * (exact.abs() + 1)).all())


def test_is_not_preferred_where_tiles_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(*features: str) -> bool:
        monkeypatch.setattr(products.llvm, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
        products.preferred.cache_clear()
        return products.preferred()

    monkeypatch.setattr(products, "parallel", lambda: 1)
    try:
        assert has("avx512f", "avx512bf16")
        assert not has("avx512f", "avx512bf16", "amx-bf16")
        assert not has("avx512f")
    finally:
        products.preferred.cache_clear()
