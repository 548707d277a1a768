"""Linear: a matrix product with weights stored in the order that the device reads fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from paceline import kernels, processor
from paceline.errors import ModelError
from paceline.kernels.blocks import Blocks, WeightsByName

if TYPE_CHECKING:
    from paceline.kernels.integer import IntegerPanels
    from paceline.kernels.products import Panels

MAX_ROWS_OWN, SMALL = 64, 8 << 20
"""With AMX, oneDNN multiplies, but our kernel takes up to MAX_ROWS_OWN rows if the weight has at most SMALL bytes. Such
products take microseconds, layers with only our steps run in a single call (`kernels/program.py`), and sums have a
fixed order, as in attention for up to 64 tokens of a row."""
BLOCK = 16
"""Rows of a library call if sums must have a fixed order: for the same number of rows, it uses the same kernel."""


class Linear:
    """x @ weight.T + bias. Weights are stored in `panels` if our kernel is `preferred`, in oneDNN's order on other CPUs
    with bfloat16 units, and unchanged elsewhere.

    few     a second copy in the order of our kernel, for up to MAX_ROWS_OWN rows.
    exact   a row's result is the same, bit for bit, among any other rows. Our kernel computes it, or, where it does not
            run, the library in calls of BLOCK rows.
    nbytes  bytes of the weight. divisor: results are divided by it.
    wide    return float32, whatever the dtype of x, so that logits are not rounded. On a CPU where our kernel does not
            run, a weight of 16 bits is then kept in float32. In float64 all stays float64."""

    few: Panels | None = None
    _takes: torch.dtype | None = None  # dtype to which a wide product converts x

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, exact: bool = False, divisor: float = 1.0,
        wide: bool = False,
    ):  # fmt: skip
        if wide and weight.device.type == "cpu" and not _multiplied_by_us(weight):
            weight, bias = weight.float(), None if bias is None else bias.float()
        self.bias, self.divisor, self.nbytes = bias, divisor, weight.nbytes
        self.wide, self._takes = wide, weight.dtype if wide else None
        self._store(weight, exact)

    def _store(self, weight: torch.Tensor, exact: bool) -> None:
        """Store the weight only in the order in which it will be read."""
        vars(self).pop("weight", None)
        self.is_exact, self.few = exact, None
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_units(torch.bfloat16)
        self.panels: Panels | IntegerPanels | None = None
        ours = self.wide and weight.dtype == torch.bfloat16
        if kernels.supported(weight.dtype) if exact or ours else kernels.preferred(weight.dtype):
            from paceline.kernels.products import Panels, fits

            out = torch.float32 if self.wide else weight.dtype
            self.panels = Panels(weight, self.bias, out) if fits(weight) else None
        elif self.nbytes <= SMALL:
            self.keep_for_few(weight)
        if self.panels is None:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else aligned(weight)

    @property
    def kernel(self) -> str:
        """Describe the kernel that multiplies by this weight."""
        library = "oneDNN" if self.packed else "torch"
        if self.panels is not None:
            return self.panels.kernel
        return f"{library}, up to {MAX_ROWS_OWN} rows {self.few.kernel}" if self.few is not None else library

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self.panels if self.panels is not None else self._in_blocks if self.is_exact else self._by_library
        x = x if self._takes is None else x.to(self._takes)
        return product(x) if self.divisor == 1.0 else product(x) / self.divisor

    def keep_for_few(self, weight: torch.Tensor) -> None:
        """Also keep the product's `weight` in our kernel's order, if that is faster for up to MAX_ROWS_OWN rows, whose
        sums then have a fixed order."""
        if self.packed and not self.is_exact and kernels.supported(weight.dtype):
            from paceline.kernels import amx
            from paceline.kernels.products import Panels, fits

            self.few = Panels(weight, self.bias) if fits(weight) and amx.supported() else None

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        if self.few is not None and len(x) <= MAX_ROWS_OWN:
            return self.few(x)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self.wide and x.is_cuda and x.dtype != torch.float32:
            sums = torch.mm(x, self.weight.T, out_dtype=torch.float32)
            return sums if self.bias is None else sums + self.bias
        out = F.linear(x, self.weight, self.bias)
        return out.float() if self.wide and out.dtype != torch.float64 else out

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Call `_by_library` with BLOCK rows at a time, the last padded with zeros."""
        blocks = [F.pad(part, (0, 0, 0, BLOCK - len(part))) for part in x.split(BLOCK)]
        return torch.cat([self._by_library(block) for block in blocks])[: len(x)]

    def make_exact(self) -> None:
        """Fix the order of sums. ModelError if the library's order depends on a row's place in the call."""
        if not self.is_exact and self.panels is None:
            self._store(self.dense(), exact=True)
            if self.panels is None:
                self._check_places()

    def _check_places(self) -> None:
        """Raise ModelError if a row's result depends on its place in a call."""
        weight = self.dense()
        random = torch.Generator().manual_seed(0)
        x = torch.randn(1, weight.shape[1], generator=random).to(weight.dtype).expand(BLOCK, -1).contiguous()
        out = self._by_library(x)
        if not torch.equal(out, out[:1].expand_as(out)):
            raise ModelError(
                "exact: this processor's library of matrix products adds in an order that depends on the row, and our "
                "own products need AVX-512 BF16 (bfloat16) or AVX2 (float32)"
            )

    def rows(self, ids: torch.Tensor) -> Linear:
        """Make the product with only the outputs `ids`, from a copy of their weights."""
        bias = None if self.bias is None else self.bias[ids]
        return Linear(self.dense()[ids], bias, exact=self.is_exact, divisor=self.divisor, wide=self.wide)

    def dense(self) -> torch.Tensor:
        """The weight [outputs, inputs]."""
        if self.panels is not None:
            return self.panels.dense()  # type: ignore[union-attr]  # BlockLinear has its own
        return self.weight.to_dense() if self.packed else self.weight


class BlockLinear(Linear):
    """A product with stacked blocks of four to eight bits, in the dtype of x. Rows of x are rounded to
    `Blocks.activations` bits, and sums have a fixed order. Unless the product is exact, many rows may be multiplied in
    another way (`kernels/integer.py`).

    keep  also keep the blocks, for `rows` and `dense`. A GGUF file's blocks stay mapped from disk, but blocks that were
          made in memory then take twice their memory."""

    panels: IntegerPanels

    def __init__(
        self, parts: Sequence[Blocks], bias: torch.Tensor | None = None, *, exact: bool = False, divisor: float = 1.0,
        wide: bool = False, keep: bool = True,
    ):  # fmt: skip
        from paceline.kernels.integer import IntegerPanels

        self.bias, self.divisor, self.is_exact, self.packed = bias, divisor, exact, True
        self.nbytes, self.wide = sum(part.nbytes for part in parts), wide
        self.panels = IntegerPanels(parts, bias, exact=exact, wide=wide)
        self._parts = parts if keep else ()

    def make_exact(self) -> None:
        self.is_exact = self.panels.exact = True

    def rows(self, ids: torch.Tensor) -> BlockLinear:
        (blocks,) = self._parts
        bias = None if self.bias is None else self.bias[ids]
        return BlockLinear([blocks.rows(ids)], bias, exact=self.is_exact, divisor=self.divisor, wide=self.wide)

    def dense(self) -> torch.Tensor:
        return torch.cat([part.dense() for part in self._parts])


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
