"""x @ weight.T with the same order of sums for any number of rows, in float32, or in bfloat16 with AVX-512 BF16.

So a token's logits are the same, bit for bit, alone and in a draft (docs/exact.md). In bfloat16 this is also faster on
CPUs without AMX tiles, such as Zen 4. There oneDNN reads weights at two thirds of the memory's speed, and for two to
sixteen rows, as in verifying a draft, it does not compute while it reads (docs/log.md, "Products"). Here up to 12 rows
are summed in registers while a panel is read; with more rows, the last rows prefetch the next panel."""

import torch
from torch.nn.functional import pad

from paceline import processor
from paceline.kernels import amx
from paceline.kernels import vectors as v
from paceline.kernels.ops import ALL_ROWS
from paceline.kernels.tiles import Tiles, tile
from paceline.kernels.vectors import Value

COLUMNS = 32  # outputs of a panel: two registers of AVX-512
STEPS = 4
"""Steps in an iteration of the innermost loop. A step is four bytes of a row: two inputs in bfloat16, or a float32."""
PER_STEP = {torch.bfloat16: 2, torch.float32: 1}
"""Number of inputs of a step."""


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernel can multiply these weights [outputs, width]."""
    inputs = PER_STEP.get(weight.dtype)
    return weight.device.type == "cpu" and inputs is not None and weight.shape[1] % (inputs * STEPS) == 0


class Panels:
    """A weight [outputs, width] that `fits`, and a bias [outputs] or None, in the order in which the kernel reads them.

    out  dtype of the results: None is the weight's; or float32."""

    own_rows = ALL_ROWS

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.dtype | None = None):
        self._out = out or weight.dtype
        self.outputs, self.width = weight.shape
        columns = -(-self.outputs // COLUMNS) * COLUMNS
        missing, inputs = columns - self.outputs, PER_STEP[weight.dtype]
        rows = pad(weight, (0, 0, 0, missing)) if missing else weight
        self._panels = rows.unflatten(0, (-1, COLUMNS)).unflatten(2, (-1, inputs)).transpose(1, 2).contiguous()
        self._bias = torch.zeros(columns)
        if bias is not None:
            self._bias[: self.outputs] = bias
        self._steps = self.width // inputs
        by_amx = weight.dtype == torch.bfloat16 and self._steps % 16 == 0 and amx.supported()
        self._tiles = amx.dense_tiles(self._out) if by_amx else _tiles(self._steps, weight.dtype, self._out)
        self.kernel = f"our {'AMX' if by_amx else 'vector'} kernel of {str(weight.dtype).removeprefix('torch.')}"
        self._at = self._panels.data_ptr(), self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x @ weight.T + bias, [rows, outputs]. x: [rows, width], in the weight's dtype."""
        x, rows = x.contiguous(), len(x)
        out = x.new_empty(rows, self.outputs, dtype=self._out)
        if rows:
            sizes = {"rows": rows, "outputs": self.outputs, "stride": self.outputs * out.itemsize, "units": self._steps}
            self._tiles.multiply(x.data_ptr(), *self._at, out.data_ptr(), **sizes)
        return out

    def dense(self) -> torch.Tensor:
        """The weight [outputs, width]."""
        return self._panels.transpose(1, 2).reshape(-1, self.width)[: self.outputs].contiguous()


@processor.remembered
def _tiles(steps: int, dtype: torch.dtype, out: torch.dtype) -> Tiles:
    """Compile tiles for rows of `steps` steps, of four bytes each."""

    def body(x: Value, w: Value, ahead: Value, i: Value, sums: list[Value]) -> list[Value]:
        """Do STEPS steps. A step multiplies four bytes of each row, one or two inputs, by the weights of 32 outputs."""
        w, ahead, x = (at + i * (size * STEPS) for at, size in ((w, 4 * COLUMNS), (ahead, 4 * COLUMNS), (x, 4)))
        for step in range(STEPS):
            v.prefetch(ahead + 128 * step, 128)
            weights = [v.load(w + 128 * step + 64 * half, kind, align=64) for half in (0, 1)]
            for row in range(len(sums) // 2):
                numbers = v.splat(v.load(x + 4 * (steps * row + step), kind, 1))
                for half in (0, 1):
                    sums[2 * row + half] = dot(weights[half], numbers, sums[2 * row + half])
        return sums

    kind, dot = (v.F32, v.fma) if dtype == torch.float32 else (v.I32, _dot_of_pairs)

    # The sums of so many rows take 24 of AVX-512's 32 registers, or 12 of AVX2's 16.
    most = 12 if processor.has("avx512f") else 3

    def write(module: v.Module) -> None:
        for rows in range(1, most + 1):
            module.add(f"tile{rows}", tile(rows, 2, out, lambda units: units // STEPS, body))

    name = f"{dtype} {steps}" + ("" if out == dtype else " wide")
    return Tiles(v.compiled(name, write), most, columns=COLUMNS, dtype=out, unit=4 * COLUMNS, row_unit=4)


def _dot_of_pairs(weights: Value, x: Value, sums: Value) -> Value:
    """Add the products of two bfloat16 numbers to `sums` in each lane."""
    return v.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", sums.ir.type, sums, weights, x)
