"""Matrix products by our kernels, of numbers and of blocks: right to their rounding, the same for one row as for many,
and within their bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from tests.gguf_files import random_blocks

from paceline import kernels, processor
from paceline.kernels import amx, integer, products
from paceline.kernels.blocks import (
    ACTIVATIONS,
    KINDS,
    MXFP4,
    Q4_0,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    Blocks,
    Kind,
    quantise,
)  # fmt: skip
from paceline.kernels.integer import MANY, IntegerPanels
from paceline.kernels.linear import MAX_ROWS_OWN, BlockLinear, Linear, OneDnnProduct, linear
from paceline.kernels.ops import ALL_ROWS
from paceline.kernels.products import Panels

HALF, FULL = torch.bfloat16, torch.float32
ROUNDING = {HALF: 2.0**-8, FULL: 0.0}
"""Half a unit in the last place of bfloat16, relative. What sums in float32 are off by is added to it."""
COUNTS = (1, 2, 4, 5, 7, 12, 13, 41)
"""Numbers of rows that make tiles of many sizes: of few rows, and of many."""

needs_halves = pytest.mark.skipif(not kernels.supported(), reason="this CPU has no AVX-512 BF16")
needs_amx = pytest.mark.skipif(not amx.supported(), reason="this CPU has no AMX, or may not use it")
needs_blocks = pytest.mark.skipif(not integer.supported(), reason="this CPU has no float16 conversion")


def random(seed, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rounded(x):
    """x as the kernel of blocks sees it: whole numbers -127 to 127 by 32 inputs, times a float32 scale; float64."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale, inverse = largest / 127, 127 / largest
    numbers = torch.where(inverse.isfinite(), blocks * inverse, 0).round()
    return (numbers.double() * scale.double()).flatten(-2)


@dataclass(frozen=True)
class Way:
    """A kernel: of numbers (`kind` None) or of blocks, for inputs of a dtype; path: the instructions for blocks."""

    dtype: torch.dtype
    kind: Kind | None = None
    path: str = "plain"

    @property
    def step(self):
        """Widths are a multiple of this."""
        return 8 if self.kind is None else self.kind.inputs

    def made(self, outputs, width, bias=None):
        """Panels, and the weight that they hold."""
        if self.kind is None:
            weight = random(1, outputs, width).to(self.dtype)
            return Panels(weight, bias), weight
        blocks = random_blocks(self.kind, outputs, width)
        return IntegerPanels([blocks], bias, exact=True), blocks.dense()

    def x(self, seed, rows, width):
        return random(seed, rows, width).to(self.dtype)

    def check(self, out, x, weight, bias):
        """`out` is x @ weight.T + bias, but for what float32 sums are off by, and one rounding to its dtype."""
        seen = x.double() if self.kind is None else rounded(x)
        exact = seen @ weight.double().T + bias.double()
        size = seen.abs() @ weight.double().abs().T + bias.double().abs()
        sums = 1e-5 if self.kind is None else 1e-6
        assert out.dtype == self.dtype
        assert bool(((out.double() - exact).abs() <= sums * size + 1.01 * ROUNDING[self.dtype] * exact.abs()).all())


WAYS = [
    *(Way(dtype) for dtype in (HALF, FULL)),
    *(Way(FULL, kind, integer.instruction_set()) for kind in KINDS.values()),
    *(Way(FULL, kind, path) for kind in (Q4_1, Q6_K, MXFP4) for path in integer.instruction_sets()[1:]),
]


def name(way):
    return str(way.dtype) if way.kind is None else f"{way.kind.name}-{way.path}"


@pytest.fixture(params=WAYS, ids=name)
def way(request, monkeypatch):
    """Every kernel that this CPU can run."""
    way = request.param
    if not (kernels.supported(way.dtype) if way.kind is None else integer.supported()):
        pytest.skip("not on this CPU")
    monkeypatch.setattr(integer, "instruction_set", lambda: way.path)
    return way


# What every kernel keeps to ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "steps"), [(16, 1), (32, 1), (1, 2), (45, 3), (200, 12)])
def test_is_the_product_rounded_once(way, outputs, steps):
    bias, width = random(2, outputs), steps * way.step
    panels, weight = way.made(outputs, width, bias)
    without, _ = way.made(outputs, width)
    for rows in COUNTS:
        x = way.x(3, rows, width)
        way.check(panels(x), x, weight, bias)
        way.check(without(x), x, weight, torch.zeros(outputs))


@pytest.mark.usefixtures("threads")
def test_a_row_is_the_same_alone_and_among_others(way):
    x, (panels, _) = way.x(4, 40, 768), way.made(100, 768)
    alone = torch.cat([panels(x[i : i + 1]) for i in range(len(x))])
    for rows in range(1, 41):
        assert torch.equal(panels(x[:rows]), alone[:rows])


def test_nothing_is_written_after_the_outputs(way, monkeypatch):
    memory, (panels, _), x = torch.full((9, 45), 7.0).to(way.dtype), way.made(45, 256), way.x(5, 5, 256)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, dtype: memory[2:7])
    panels(x)
    monkeypatch.undo()
    assert bool((memory[:2] == 7).all())
    assert bool((memory[7:] == 7).all())
    assert not bool((memory[2:7] == 7).any())


def test_no_rows_give_no_rows_and_columns_of_another_tensor_are_copied(way):
    panels, _ = way.made(40, 256)
    assert panels(torch.empty(0, 256, dtype=way.dtype)).shape == (0, 40)
    x = way.x(6, 6, 512)
    assert torch.equal(panels(x[:, 256:]), panels(x[:, 256:].clone()))


def test_what_is_not_a_number_stays_so(way):
    x, (panels, _) = way.x(7, 4, 256), way.made(40, 256)
    x[1, 5], x[2, 90] = torch.nan, torch.inf
    out = panels(x)
    assert bool(out[1].isnan().all())
    assert not bool(out[2].isfinite().any())
    assert bool(out[[0, 3]].isfinite().all())


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_the_weight_comes_back_and_may_hold_infinity(dtype):
    if not kernels.supported(dtype):
        pytest.skip("not on this CPU")
    weight = random(12, 75, 24).to(dtype)
    assert torch.equal(Panels(weight).dense(), weight)
    weight[7, 3] = torch.inf
    out = Panels(weight)(random(13, 1, 24).to(dtype))
    assert bool(out[0, 7].isinf())
    assert bool(out[0, :7].isfinite().all())


def test_which_weights_fit():
    assert products.fits(random(13, 5, 16).bfloat16())
    assert not products.fits(random(13, 5, 12).bfloat16())
    assert products.fits(random(13, 5, 12))
    assert not products.fits(random(13, 5, 16).half())


@needs_halves
@pytest.mark.parametrize("preferred", [True, False])
def test_a_linear_uses_it_where_it_is_faster(preferred, monkeypatch):
    monkeypatch.setattr(kernels, "preferred", lambda dtype: preferred)
    weight, bias, x = (random(seed, *size).bfloat16() for seed, size in ((14, (70, 64)), (15, (70,)), (16, (5, 64))))
    made = Linear(weight, bias)
    assert isinstance(made.product, products.Panels) == preferred
    exact, few = x.double() @ weight.double().T + bias.double(), torch.tensor([3, 69, 0])
    for out, right in ((made(x), exact), (made.rows(few)(x), exact[:, few])):
        assert bool(((out.double() - right).abs() <= 2 * ROUNDING[HALF] * (right.abs() + 1)).all())


def test_is_not_preferred_where_tiles_are_multiplied(monkeypatch):
    def has(*features):
        monkeypatch.setattr(processor, "has", lambda *names: {*features} >= {*names})
        with processor.forced("amx"):  # whichever level the tests run at
            return bool(kernels.preferred.__wrapped__(HALF))

    assert has("avx512f", "avx512bf16")
    assert not has("avx512f", "avx512bf16", "amx-bf16")
    assert not has("avx512f")


# Blocks --------------------------------------------------------------------------------------------------------------


@needs_blocks
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_all_instructions_give_the_same_bits(kind, activations, monkeypatch):
    """Those of other processors too, as far as this one has them: every path that it can run."""
    blocks = random_blocks(kind, 33, 512)
    blocks.activations = activations
    x, panels = 100 * random(4, 33, 512), IntegerPanels([blocks])
    right = None
    for path in integer.instruction_sets():
        monkeypatch.setattr(integer, "instruction_set", lambda path=path: path)
        for rows in (4, 33):
            out = panels(x[:rows])
            right = panels(x) if right is None else right
            assert torch.equal(out, right[:rows]), path
    assert right is not None
    exact = x.double() @ blocks.dense().double().T
    error = float((right.double() - exact).norm() / exact.norm())
    assert error < {8: 2e-2, 16: 1e-4}[activations]


@needs_blocks
def test_rows_beyond_the_cache_are_multiplied_in_turn(monkeypatch):
    """Here 16 at a time. 288 inputs: the last unit is not full, and what follows a row must not be read as a scale."""
    x, panels = random(4, 100, 288), IntegerPanels([random_blocks(Q8_0, 40, 288)])
    x[:50] *= 1e30
    right = panels(x)
    monkeypatch.setattr(integer, "_cached_bytes", lambda: 16 * 40 * 10)
    assert torch.equal(panels(x), right)


@needs_amx
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_many_rows_are_multiplied_in_bfloat16_unless_exact(kind):
    """Without rounding x to eight bits. A row is the same among any number of rows, of which each has its place. There
    are several groups of panels, the last one not full; so are chunks, and of rows there are more than a tile takes."""
    width = 512 + (kind.inputs if kind.inputs > 32 else 96)
    bias, x = random(2, 333), random(3, 530, width).to(HALF)
    blocks = random_blocks(kind, 333, width)
    panels, exact = IntegerPanels([blocks], bias), IntegerPanels([blocks], bias, exact=True)
    weight = blocks.dense().double()
    right = x.double() @ weight.T + bias.double()
    size = x.double().abs() @ weight.abs().T + bias.double().abs()
    whole = panels(x)
    assert bool(((whole - right).abs() <= ROUNDING[HALF] * (size + right.abs())).all())
    assert float((whole - right).norm()) < float((exact(x) - right).norm())
    for rows in (MANY, 47, 64, 81, 513):
        assert torch.equal(panels(x[:rows]), whole[:rows])
    few = MANY - 1
    assert torch.equal(panels(x[:few]), exact(x)[:few])


@needs_amx
@pytest.mark.usefixtures("threads")
def test_other_users_of_amx_keep_their_sizes():
    """oneDNN multiplies in bfloat16 on the same threads, with registers of its own sizes."""
    x, panels = random(4, 48, 512).to(HALF), IntegerPanels([random_blocks(Q4_K, 48, 512)])
    a, b = random(5, 128, 256).to(HALF), random(6, 256, 128).to(HALF)
    right, theirs = panels(x), a @ b
    for _ in range(20):
        assert torch.equal(a @ b, theirs)
        assert torch.equal(panels(x), right)


@needs_blocks
def test_the_largest_sums_do_not_overflow():
    weight, x = quantise(torch.full((16, 256), -1.0), Q8_0), torch.full((1, 256), 3.0)
    assert torch.allclose(IntegerPanels([weight])(x), torch.full((1, 16), -768.0), rtol=1e-3)


@needs_blocks
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_the_largest_codes_times_the_largest_numbers(kind, byte, sign, monkeypatch):
    """Some instructions add in 16 bits. The scales are those of other blocks: codes alone are at their ends."""
    data = random_blocks(kind, 16, 512).data.unflatten(1, (-1, kind.nbytes))
    code_bytes = kind.inputs * integer.FORMATS[kind].bits // 8
    begin, end = (0, 192) if kind == Q6_K else (kind.nbytes - code_bytes, kind.nbytes)
    data[..., begin:end] = byte
    blocks, x = Blocks(kind, data.flatten(1)), torch.full((2, 512), 3.0 * sign)
    for activations in ACTIVATIONS:
        panels, said = IntegerPanels([Blocks(kind, blocks.data, activations)]), []
        for path in integer.instruction_sets():
            monkeypatch.setattr(integer, "instruction_set", lambda path=path: path)
            said.append(panels(x))
        assert all(torch.equal(said[-1], other) for other in said)


@needs_blocks
def test_parts_of_several_kinds_are_one_product():
    parts = [random_blocks(kind, 20, 512, seed) for seed, kind in enumerate((Q4_K, Q4_K, Q6_K, Q8_0, Q4_1))]
    bias, x = random(5, 100), random(6, 7, 512)
    panels, dense = IntegerPanels(parts, bias), torch.cat([part.dense() for part in parts])
    Way(FULL, Q8_0).check(panels(x), x, dense, bias)
    alone = [IntegerPanels([part], own)(x) for part, own in zip(parts, bias.split(20), strict=True)]
    assert torch.equal(panels(x), torch.cat(alone, 1))


@needs_blocks
@pytest.mark.parametrize("path", integer.instruction_sets())
def test_zeros_and_the_smallest_numbers_are_no_trouble(path, monkeypatch):
    monkeypatch.setattr(integer, "instruction_set", lambda: path)
    x, panels = torch.zeros(3, 64), IntegerPanels([random_blocks(Q4_0, 16, 64)])
    x[1], x[2] = 1e-45, 1e-38
    assert bool((panels(x).abs() < 1e-36).all())


@needs_blocks
@pytest.mark.parametrize("path", integer.instruction_sets())
@pytest.mark.parametrize("kind", [Q8_0, Q4_K], ids=lambda kind: kind.name)
def test_bfloat16_is_float32_rounded_to_the_nearest(kind, path, monkeypatch):
    """Also where the CPU has no instruction for it."""
    monkeypatch.setattr(integer, "instruction_set", lambda: path)
    panels = IntegerPanels([random_blocks(kind, 45, 8 * kind.inputs)], exact=True)
    x = random(3, 40, panels.width).to(HALF)
    x[1] *= 1e30
    x[2, 5], x[3, 5] = float("nan"), float("inf")
    expected = panels(x.float()).to(HALF)
    assert torch.equal(panels(x).nan_to_num(7.0), expected.nan_to_num(7.0))


@needs_blocks
def test_where_torch_has_another_openmp_our_own_threads_compute(monkeypatch):
    """In several threads that ask at once, too, and after a fork."""
    panels, before = IntegerPanels([random_blocks(Q8_0, 400, 256)]), torch.get_num_threads()
    asked = [random(seed, rows, 256) for seed, rows in enumerate((1, 5, 40, 200))]
    right = [panels(x) for x in asked]
    monkeypatch.setattr(kernels, "_fork", lambda: None)
    monkeypatch.setattr(kernels, "_helpers", kernels._Helpers())
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(panels, asked * 8))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(said, right * 8, strict=True))
    assert kernels._helpers._count == 2


def test_helpers_are_made_anew_in_a_forked_process():
    made = kernels._helpers
    kernels._forget_helpers()
    assert kernels._helpers is not made


@needs_halves
def test_onednn_leaves_few_rows_to_our_kernel():
    """As with AMX, by the kernel of this processor."""
    sizes = (96, 1024), (96,), (MAX_ROWS_OWN + 1, 1024)
    weight, bias, x = (random(21 + i, *size).bfloat16() for i, size in enumerate(sizes))
    ours = Panels(weight, bias)
    alone, shared = OneDnnProduct(weight, bias, None), OneDnnProduct(weight, bias, ours)
    assert (alone.own_rows, shared.own_rows, ours.own_rows) == (0, MAX_ROWS_OWN, ALL_ROWS)
    few = x[:MAX_ROWS_OWN]
    assert torch.equal(shared(few), ours(few))
    assert torch.equal(shared(x), alone(x))
    assert not torch.equal(ours(x), alone(x)), "the two must be told apart"
    assert torch.equal(shared.dense(), weight)


@needs_blocks
def test_a_linear_keeps_blocks_where_they_can_be_multiplied(monkeypatch):
    parts, bias, x = [random_blocks(Q8_0, 20, 64), random_blocks(Q4_0, 12, 64)], random(9, 32), random(10, 5, 64)
    made = linear(parts, bias, FULL)
    assert isinstance(made, BlockLinear)
    said = made(x)
    exact = linear(parts, bias, FULL)
    exact.make_exact()
    assert torch.equal(exact(x), said)
    dense = torch.cat([part.dense() for part in parts])
    assert torch.equal(made.dense(), dense)
    head, few = linear(parts[:1], bias[:20], FULL), torch.tensor([19, 2])
    assert torch.equal(head.rows(few)(x), made(x)[:, few])
    head.make_exact()
    assert head.rows(few).is_exact
    mixed = linear([parts[0], dense[20:]], bias, FULL)
    assert torch.allclose(mixed(x), x @ dense.T + bias, atol=1e-5)
    assert type(linear(parts, bias, torch.float16)) is Linear
    monkeypatch.setattr(integer, "supported", lambda: False)
    plain = linear(parts, bias, FULL)
    assert type(plain) is Linear
    assert torch.allclose(plain(x), x @ dense.T + bias, atol=1e-5)


# Results in float32 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, torch.float16, FULL])
def test_sums_of_a_wide_product_are_not_rounded(dtype, level):
    """Those of 16 bits would be rounded by a part in 256, and two logits near each other be equal."""
    weight, x, bias = random(3, 70, 96).to(dtype), random(4, 5, 96).to(dtype), random(5, 70).to(dtype)
    wide = Linear(weight, bias, wide=True)
    right = x.double() @ weight.double().T + bias.double()
    for product in (wide, wide.rows(torch.arange(70))):
        out = product(x)
        assert out.dtype == FULL
        assert torch.allclose(out.double(), right, rtol=1e-5, atol=1e-4)
    few = torch.tensor([69, 0, 33])
    wide.make_exact()  # the sums of a library hang on the number of outputs
    assert torch.equal(wide.rows(few)(x), wide(x)[:, few])


def test_a_wide_product_in_float64_stays_in_it(level):
    weight, x, bias = (random(seed, *size).double() for seed, size in ((3, (70, 96)), (4, (5, 96)), (5, (70,))))
    wide, few = Linear(weight, bias, wide=True), torch.tensor([69, 0, 33])
    right = x @ weight.T + bias
    for out, of in ((wide(x), right), (wide.rows(few)(x), right[:, few])):
        assert out.dtype == torch.float64
        assert torch.allclose(out, of, rtol=1e-12, atol=1e-12)


@needs_blocks
@pytest.mark.parametrize("rows", [3, MANY + 1])
def test_a_wide_product_of_blocks_is_what_is_rounded_otherwise(rows, level):
    blocks, x = random_blocks(Q4_1, 45, 256), random(4, rows, 256).to(HALF)
    wide, exact = linear([blocks], None, HALF, wide=True), IntegerPanels([blocks], exact=True)
    assert wide(x).dtype == FULL
    assert torch.equal(wide(x).to(HALF), exact(x))
    assert not torch.equal(wide(x), exact(x).float())
