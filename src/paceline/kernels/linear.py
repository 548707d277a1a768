"""Linear: a matrix product with weights stored in the order that the device reads fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from paceline import kernels, processor
from paceline.errors import ModelError
from paceline.kernels.blocks import Blocks, WeightsByName
from paceline.kernels.ops import ALL_ROWS
from paceline.kernels.rows import capped

if TYPE_CHECKING:
    from paceline.kernels.integer import IntegerPanels
    from paceline.kernels.products import Panels

MAX_ROWS_OWN, SMALL = 64, 8 << 20
"""With AMX, oneDNN multiplies, but our kernel takes up to MAX_ROWS_OWN rows if the weight has at most SMALL bytes. Such
products take microseconds, layers with only our steps run in a single call (`kernels/program.py`), and sums have a
fixed order, as in attention for up to 64 tokens of a row."""
BLOCK = 16
"""Rows of a library call if sums must have a fixed order: for the same number of rows, it uses the same kernel."""


class Product(Protocol):
    """x [rows, inputs] @ weight.T + bias, [rows, outputs], by a kernel.

    kernel    its description.
    own_rows  the largest number of rows for which it is our kernel, whose sums have a fixed order."""

    kernel: str
    own_rows: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def dense(self) -> torch.Tensor:
        """The weight [outputs, inputs]."""


class TorchProduct:
    """A product by torch on any device. wide: results have at least 32 bits."""

    kernel, own_rows = "torch", 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool):
        self.weight, self.bias, self.wide = aligned(weight), bias, wide

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.wide and x.is_cuda and x.dtype != torch.float32:
            sums = torch.mm(x, self.weight.T, out_dtype=torch.float32)
            return sums if self.bias is None else sums + self.bias
        out = F.linear(x, self.weight, self.bias)
        return out.float() if self.wide and out.dtype != torch.float64 else out

    def dense(self) -> torch.Tensor:
        return self.weight


class OneDnnProduct:
    """A product by oneDNN, with the weight in its order.

    few  the same product by our kernel, for up to MAX_ROWS_OWN rows, with a second copy of the weight; or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, few: Panels | None):
        self.weight, self.bias, self.few = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias, few
        self.kernel = f"oneDNN, up to {MAX_ROWS_OWN} rows {few.kernel}" if few else "oneDNN"
        self.own_rows = MAX_ROWS_OWN if few else 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.few is not None and len(x) <= MAX_ROWS_OWN:
            return self.few(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def dense(self) -> torch.Tensor:
        return self.weight.to_dense()


class FixedProduct:
    """A product by a library, with the same order of sums for a row among any other rows: it is called with BLOCK rows
    at a time, the last padded with zeros. ModelError if the order depends on a row's place in a call."""

    own_rows = 0

    def __init__(self, library: TorchProduct | OneDnnProduct):
        self.library, self.kernel = library, library.kernel
        weight, random = library.dense(), torch.Generator().manual_seed(0)
        x = torch.randn(1, weight.shape[1], generator=random).to(weight.dtype).expand(BLOCK, -1).contiguous()
        out = library(x)
        if not torch.equal(out, out[:1].expand_as(out)):
            raise ModelError(
                "exact: this processor's library of matrix products adds in an order that depends on the row, and our "
                "own products need AVX-512 BF16 (bfloat16) or AVX2 (float32)"
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        blocks = [F.pad(part, (0, 0, 0, BLOCK - len(part))) for part in x.split(BLOCK)]
        return torch.cat([self.library(block) for block in blocks])[: len(x)]

    def dense(self) -> torch.Tensor:
        return self.library.dense()


def _product(weight: torch.Tensor, bias: torch.Tensor | None, exact: bool, wide: bool) -> Product:
    """Choose the kernel that multiplies by a weight: ours where it is `preferred`, or must be because of `exact` or
    `wide`; oneDNN on other CPUs with units for bfloat16; torch elsewhere."""
    ours = exact or (wide and weight.dtype == torch.bfloat16)
    if kernels.supported(weight.dtype) if ours else kernels.preferred(weight.dtype):
        from paceline.kernels.products import Panels, fits

        if fits(weight):
            return Panels(weight, bias, torch.float32 if wide else weight.dtype)
    if not _has_units(weight):
        library: TorchProduct | OneDnnProduct = TorchProduct(weight, bias, wide)
    else:
        library = OneDnnProduct(weight, bias, None if exact else _for_few(weight, bias))
    return FixedProduct(library) if exact else library


def _for_few(weight: torch.Tensor, bias: torch.Tensor | None) -> Panels | None:
    """Our kernel for up to MAX_ROWS_OWN rows, where it is faster than oneDNN."""
    if weight.nbytes > SMALL or not kernels.supported(weight.dtype):
        return None
    from paceline.kernels import amx
    from paceline.kernels.products import Panels, fits

    return Panels(weight, bias) if fits(weight) and amx.supported() else None


class Linear:
    """x @ weight.T + bias, divided by `divisor`; with a `cap`, between -cap and cap (`capped`).

    product   the kernel that computes it, with the weight in the order that it reads fastest.
    is_exact  a row's result is the same, bit for bit, among any other rows.
    in_units  the weight has the 16 bits or fewer for which this CPU has units, so that compiled steps fit beside it.
    nbytes    bytes of the weight.
    wide      results are in float32, whatever the dtype of x, as for logits, whose sums are not rounded. On a CPU where
              our kernel does not run, a weight of 16 bits is then kept in float32. In float64 all stays float64."""

    product: Product
    cap: float | None = None
    _takes: torch.dtype | None = None  # the dtype to which x is converted

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, exact: bool = False, divisor: float = 1.0,
        wide: bool = False,
    ):  # fmt: skip
        if wide and weight.device.type == "cpu" and not _multiplied_by_us(weight):
            weight, bias = weight.float(), None if bias is None else bias.float()
        self.bias, self.divisor, self.nbytes = bias, divisor, weight.nbytes
        self.wide, self._takes = wide, weight.dtype if wide else None
        self.is_exact, self.in_units = exact, _has_units(weight)
        self.product = _product(weight, bias, exact, wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.product(x if self._takes is None else x.to(self._takes))
        out = out if self.divisor == 1.0 else out / self.divisor
        return out if self.cap is None else capped(out, self.cap)

    def make_exact(self) -> None:
        """Fix the order of sums. ModelError if the library's order depends on a row's place in the call."""
        if not self.is_exact and self.product.own_rows < ALL_ROWS:
            weight = self.dense()
            del self.product  # its memory is free before the new one is made
            self.product = _product(weight, self.bias, exact=True, wide=self.wide)
        self.is_exact = True

    def rows(self, ids: torch.Tensor) -> Linear:
        """Make the product with only the outputs `ids`, from a copy of their weights."""
        bias = None if self.bias is None else self.bias[ids]
        made = Linear(self.dense()[ids], bias, exact=self.is_exact, divisor=self.divisor, wide=self.wide)
        made.cap = self.cap
        return made

    def dense(self) -> torch.Tensor:
        """The weight [outputs, inputs]."""
        return self.product.dense()


class BlockLinear(Linear):
    """A product with stacked blocks of four to eight bits, in the dtype of x. Rows of x are rounded to
    `Blocks.activations` bits, and sums have a fixed order. Unless the product is exact, many rows may be multiplied in
    another way (`kernels/integer.py`).

    keep  also keep the blocks, for `rows` and `dense`. A GGUF file's blocks stay mapped from disk, but blocks that were
          made in memory then take twice their memory."""

    product: IntegerPanels

    def __init__(
        self, parts: Sequence[Blocks], bias: torch.Tensor | None = None, *, exact: bool = False, divisor: float = 1.0,
        wide: bool = False, keep: bool = True,
    ):  # fmt: skip
        from paceline.kernels.integer import IntegerPanels

        self.bias, self.divisor, self.is_exact, self.in_units = bias, divisor, exact, True
        self.nbytes, self.wide = sum(part.nbytes for part in parts), wide
        self.product = IntegerPanels(parts, bias, exact=exact, wide=wide, keep=keep)

    def make_exact(self) -> None:
        self.is_exact = self.product.exact = True

    def rows(self, ids: torch.Tensor) -> BlockLinear:
        (blocks,) = self.product.blocks
        bias = None if self.bias is None else self.bias[ids]
        made = BlockLinear([blocks.rows(ids)], bias, exact=self.is_exact, divisor=self.divisor, wide=self.wide)
        made.cap = self.cap
        return made


def linear(
    parts: Sequence[torch.Tensor | Blocks], bias: torch.Tensor | None, dtype: torch.dtype, divisor: float = 1.0,
    wide: bool = False, keep: bool = True,
) -> Linear:  # fmt: skip
    """Make the product with the stacked `parts`, for x of `dtype`. Blocks are expanded unless all parts are in blocks
    and this CPU can multiply them.

    wide  return float32. keep: as in `BlockLinear`."""
    blocks = [part for part in parts if isinstance(part, Blocks)]
    if len(blocks) == len(parts):
        from paceline.kernels import amx, integer

        if dtype in integer.DTYPES and integer.supported():
            for kind in {part.kind for part in blocks}:  # Compile now, not in the middle of an answer.
                out = torch.float32 if wide else dtype
                integer.tiles_of(kind, dtype, out, integer.instruction_set(), blocks[0].activations // 8)
                if dtype == torch.bfloat16 and amx.supported() and not wide:
                    integer.by_amx(kind)
            return BlockLinear(blocks, bias, divisor=divisor, wide=wide, keep=keep)
    dense = [part.dense(dtype) if isinstance(part, Blocks) else part for part in parts]
    return Linear(dense[0] if len(dense) == 1 else torch.cat(dense), bias, divisor=divisor, wide=wide)


def stacked(weights: WeightsByName, names: Sequence[str], dtype: torch.dtype) -> Linear:
    """Make a single product of the matrices in `names` that `weights` has, stacked, with their biases."""
    names = [name for name in names if f"{name}.weight" in weights]
    biases = [bias for name in names if isinstance(bias := weights.get(f"{name}.bias"), torch.Tensor)]
    parts, bias = [weights[f"{name}.weight"] for name in names], torch.cat(biases) if biases else None
    return linear(parts, bias, dtype, keep=False)


def _multiplied_by_us(weight: torch.Tensor) -> bool:
    """Whether our kernel can multiply a weight, or needs not, because the weight has 32 bits or more."""
    if weight.dtype in (torch.float32, torch.float64):
        return True
    from paceline.kernels.products import fits

    return kernels.supported(weight.dtype) and fits(weight)


def _has_units(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_units(torch.bfloat16)


def aligned(weight: torch.Tensor) -> torch.Tensor:
    """The weight at a multiple of 64 bytes, where torch allocates; a copy if it is mapped elsewhere from a file. MKL
    adds a single row's products in an order that depends on the weight's address."""
    return weight if weight.device.type != "cpu" or weight.data_ptr() % 64 == 0 else weight.clone()


def has_units(dtype: torch.dtype) -> bool:
    """Whether this processor has arithmetic units for `dtype`."""
    if dtype == torch.float32 or not torch.backends.mkldnn.is_available():
        return dtype == torch.float32
    if not processor.allows("avx512bw"):
        return False
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype in supported and bool(supported[dtype]())
