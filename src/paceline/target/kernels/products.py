"""x @ weight.T with one order of sums for any number of rows: in bfloat16 on CPUs with AVX-512 BF16, and in float32.

So a token's logits are the same, bit for bit, alone and in a draft (docs/exact.md). In bfloat16 this is also faster on
CPUs without AMX tiles, such as Zen 4: oneDNN reads weights there at two thirds of the memory's speed, and does not
compute while it reads for two to sixteen rows, as in verifying a draft (docs/measurements.md, "Products"). Here weights
are stored in panels of 32 outputs, in the order of use. Up to 12 rows are summed in registers while a panel is read;
with more rows, the last ones prefetch the next panel.

The kernel is LLVM code, because Numba lacks the instruction. It runs on the threads of torch's OpenMP, because two
thread pools would compete for the cores. `integer.py` uses the same frame (`Tiles`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import carray, cfunc

from paceline.compiled import address, call, take
from paceline.target.kernels import on_threads

# The frame of a kernel -----------------------------------------------------------------------------------------------

AHEAD = 4096
"""Distance of the prefetch into the L2 cache, in bytes: a page, where the processor's own prefetch ends."""
(
    NEXT, CHUNK, X, WEIGHTS, BIAS, OUT, NUM_ROWS, OUTPUTS, STRIDE, UNITS, UNIT_BYTES, ROW_BYTES, PANEL, ITEMSIZE, TILES,
    MOST,
) = range(16)  # fmt: skip
"""Places in the task of the compiled function. NEXT: the next panel; X to OUT and TILES: addresses."""

_DECLARATIONS = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, i32, <16 x i1>)
"""


class Tiles:
    """The compiled functions @tile1 to @tileN: @tile3 multiplies 3 adjacent rows by a panel.

    most            N. address: of a function, by its name.
    columns         outputs of a panel.
    unit, row_unit  bytes of a unit of a panel, and of a unit of a row."""

    def __init__(
        self,
        declarations: str,
        functions: Iterable[str],
        *,
        most: int,
        columns: int,
        dtype: torch.dtype,
        unit: int,
        row_unit: int,
    ):
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="pic", jit=True
        )
        parsed = llvm.parse_assembly("\n".join([_DECLARATIONS, declarations, *functions]))
        parsed.verify()
        self._engine = llvm.create_mcjit_compiler(parsed, machine)  # the code lives as long as its engine
        self._engine.finalize_object()
        self.most, self.address = most, cache(self._engine.get_function_address)
        self._tiles = array("q", [self.address(f"tile{n}") for n in range(1, most + 1)])
        self._sizes = unit, row_unit, columns, dtype.itemsize, self._tiles.buffer_info()[0], most

    def multiply(
        self, x: int, weights: int, bias: int, out: int, *, rows: int, outputs: int, stride: int, units: int
    ) -> None:
        """out = x @ weights.T + bias, at these addresses.

        stride  bytes from one row of `out` to the next. units: of a panel, and of a row of x."""
        unit, row_unit, columns, *others = self._sizes
        threads = torch.get_num_threads()
        # Each thread takes a few panels at a time, so that a slow thread does not hold up the others.
        chunk = max(-(-outputs // columns) // (4 * threads), 1)
        sizes = rows, outputs, stride, units, unit, units * row_unit, columns, *others
        on_threads(_work, array("q", (0, chunk, x, weights, bias, out, *sizes)), threads)


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def _work(at):  # type: ignore[no-untyped-def]
    """Take a few panels at a time, until none is left, and multiply all rows by them. Rows are dealt evenly to as few
    tiles as possible."""
    task = carray(at, (16,), np.int64)
    functions = carray(address(task[TILES]), (task[MOST],), np.int64)
    rows, columns, panel_bytes = task[NUM_ROWS], task[PANEL], task[UNITS] * task[UNIT_BYTES]
    panels, tiles = -(-task[OUTPUTS] // columns), -(-rows // task[MOST])
    while True:
        begin = take(task, task[CHUNK])
        if begin >= panels:
            return
        for panel in range(begin, min(begin + task[CHUNK], panels)):
            weights, first = task[WEIGHTS] + panel * panel_bytes, 0
            for tile in range(tiles):
                here = rows // tiles + (tile < rows % tiles)
                # The last tile of a panel prefetches what comes after the panel.
                away = 0 if tile < tiles - 1 else AHEAD if tiles == 1 else panel_bytes
                x, bias = task[X] + first * task[ROW_BYTES], task[BIAS] + 4 * columns * panel
                out = task[OUT] + task[ITEMSIZE] * columns * panel + first * task[STRIDE]
                left = task[OUTPUTS] - columns * panel
                call(functions[here - 1], (x, weights, weights + away, bias, out, task[STRIDE], left, task[UNITS]))
                first += here


def splat(name: str, value: str, kind: str) -> Iterator[str]:
    """A vector of 16 times `value`."""
    yield f"  {name}.0 = insertelement <16 x {kind}> poison, {kind} {value}, i64 0"
    yield f"  {name} = shufflevector <16 x {kind}> {name}.0, <16 x {kind}> poison, <16 x i32> zeroinitializer"


def constant(value: int, kind: str) -> str:
    """A literal vector of 16 times `value`."""
    return "<" + ", ".join([f"{kind} {value}"] * 16) + ">"


def tile(rows: int, halves: int, turns: str, turn: Iterable[str], dtype: torch.dtype) -> Iterator[str]:
    """@tileN for N = `rows`: rows times a panel of 16 * `halves` outputs, plus the bias, with sums in registers; stores
    the first %columns.

    turns  how often the loop runs: a number, or a name that `turn` defines.
    turn   code that adds to the sums %s{row}.{half} what turn %turn has, as %z{row}.{half}."""
    sums = [(row, half) for row in range(rows) for half in range(halves)]
    takes = "ptr %x, ptr %w, ptr %ahead, ptr %bias, ptr %y, i64 %stride, i64 %columns, i64 %units"
    yield f"define void @tile{rows}({takes}) {{"
    yield "entry:"
    for half in range(halves):
        yield from loaded(f"%b{half}", "%bias", 64 * half, "<16 x float>", 64)
    yield "  br label %loop"
    yield "loop:"
    yield "  %turn = phi i64 [0, %entry], [%next, %loop]"
    for row, half in sums:
        yield f"  %s{row}.{half} = phi <16 x float> [%b{half}, %entry], [%z{row}.{half}, %loop]"
    yield from turn
    yield "  %next = add nuw nsw i64 %turn, 1"
    yield f"  %more = icmp ult i64 %next, {turns}"
    yield "  br i1 %more, label %loop, label %store"
    yield "store:"
    for half in range(halves):
        yield f"  %left{half} = sub i64 %columns, {16 * half}"
        yield from splat(f"%ends{half}", f"%left{half}", "i64")
        yield f"  %mask{half} = icmp slt <16 x i64> <{', '.join(f'i64 {i}' for i in range(16))}>, %ends{half}"
    for row, half in sums:
        yield from _store(f"{row}.{half}", row, half, f"%z{row}.{half}", dtype)
    yield "  ret void"
    yield "}"


def loaded(name: str, base: str, at: int, kind: str, align: int = 4) -> Iterator[str]:
    """%name: a value `at` bytes after `base`."""
    yield f"  {name}.p = getelementptr i8, ptr {base}, i64 {at}"
    yield f"  {name} = load {kind}, ptr {name}.p, align {align}"


def prefetched(base: str, begin: int, end: int) -> Iterator[str]:
    """Prefetch the cache lines `begin` to `end` bytes after `base` into the L2 cache."""
    for at in range(begin, end, 64):
        yield f"  {base}.{at} = getelementptr i8, ptr {base}, i64 {at}"
        yield f"  call void @llvm.prefetch.p0(ptr {base}.{at}, i32 0, i32 2, i32 1)"


def _store(at: str, row: int, half: int, value: str, dtype: torch.dtype) -> Iterator[str]:
    """Store 16 sums of a row, rounded to the dtype; `at` makes names unique."""
    yield f"  %o{at} = mul i64 %stride, {row}"
    yield f"  %r{at} = getelementptr i8, ptr %y, i64 %o{at}"
    yield f"  %y{at} = getelementptr i8, ptr %r{at}, i64 {16 * dtype.itemsize * half}"
    kind, short = "<16 x float>", "v16f32"
    if dtype == torch.bfloat16:
        yield from _narrowed(at, value)
        value, kind, short = f"%h{at}", "<16 x i16>", "v16i16"
    mask = f"i32 {dtype.itemsize}, <16 x i1> %mask{half}"
    yield f"  call void @llvm.masked.store.{short}.p0({kind} {value}, ptr %y{at}, {mask})"


def _narrowed(at: str, value: str) -> Iterator[str]:
    """%h{at}: bits of 16 float32 numbers rounded to bfloat16, ties to even; NaN stays NaN."""
    if llvm.get_host_cpu_features().get("avx512bf16"):
        yield f"  %n{at} = fptrunc <16 x float> {value} to <16 x bfloat>"
        yield f"  %h{at} = bitcast <16 x bfloat> %n{at} to <16 x i16>"
        return
    # Here fptrunc would call a function of LLVM's runtime library, which a process may lack.
    yield f"  %n{at} = bitcast <16 x float> {value} to <16 x i32>"
    yield f"  %n{at}.high = lshr <16 x i32> %n{at}, {constant(16, 'i32')}"
    yield f"  %n{at}.odd = and <16 x i32> %n{at}.high, {constant(1, 'i32')}"
    yield f"  %n{at}.half = add <16 x i32> %n{at}.odd, {constant(32767, 'i32')}"
    yield f"  %n{at}.up = add <16 x i32> %n{at}, %n{at}.half"
    yield f"  %n{at}.near = lshr <16 x i32> %n{at}.up, {constant(16, 'i32')}"
    yield f"  %n{at}.quiet = or <16 x i32> %n{at}.high, {constant(64, 'i32')}"
    yield f"  %n{at}.nan = fcmp uno <16 x float> {value}, zeroinitializer"
    yield f"  %n{at}.bits = select <16 x i1> %n{at}.nan, <16 x i32> %n{at}.quiet, <16 x i32> %n{at}.near"
    yield f"  %h{at} = trunc <16 x i32> %n{at}.bits to <16 x i16>"


# Panels of numbers ----------------------------------------------------------------------------------------------------

COLUMNS = 32
"""Outputs of a panel: two registers of AVX-512."""
ROWS = 12 if llvm.get_host_cpu_features().get("avx512f") else 3
"""Most rows at once: their sums take 24 of AVX-512's 32 registers, or 12 of AVX2's 16."""
STEPS = 4
"""Steps in a turn of the innermost loop. A step is four bytes of a row: two inputs in bfloat16, one in float32."""
PER_STEP = {torch.bfloat16: 2, torch.float32: 1}
"""Inputs of a step."""

_DOTS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernel can multiply these weights [outputs, width]."""
    inputs = PER_STEP.get(weight.dtype)
    return weight.device.type == "cpu" and inputs is not None and weight.shape[1] % (inputs * STEPS) == 0


class Panels:
    """A weight [outputs, width] that `fits`, and a bias [outputs] or None, as the kernel reads them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.outputs, self.width = weight.shape
        columns = -(-self.outputs // COLUMNS) * COLUMNS
        rows = torch.zeros(columns, self.width, dtype=weight.dtype)
        rows[: self.outputs] = weight
        inputs = PER_STEP[weight.dtype]
        self._panels = rows.view(-1, COLUMNS, self.width // inputs, inputs).transpose(1, 2).contiguous()
        self._bias = torch.zeros(columns)
        if bias is not None:
            self._bias[: self.outputs] = bias
        self._steps = self.width // inputs
        self._tiles = _tiles(self._steps, weight.dtype)
        self._at = self._panels.data_ptr(), self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] @ weight.T + bias, [rows, outputs], in the weight's dtype."""
        x, rows = x.contiguous(), len(x)
        out = x.new_empty(rows, self.outputs)
        if rows:
            sizes = {"rows": rows, "outputs": self.outputs, "stride": self.outputs * x.itemsize, "units": self._steps}
            self._tiles.multiply(x.data_ptr(), *self._at, out.data_ptr(), **sizes)
        return out

    def dense(self) -> torch.Tensor:
        """The weight [outputs, width]."""
        return self._panels.transpose(1, 2).reshape(-1, self.width)[: self.outputs].contiguous()


@cache
def _tiles(steps: int, dtype: torch.dtype) -> Tiles:
    """For rows of `steps` steps."""
    turns, functions = str(steps // STEPS), list[str]()
    for rows in range(1, ROWS + 1):
        functions += tile(rows, 2, turns, _turn(rows, steps, dtype), dtype)
    return Tiles(_DOTS, functions, most=ROWS, columns=COLUMNS, dtype=dtype, unit=4 * COLUMNS, row_unit=4)


def _turn(rows: int, steps: int, dtype: torch.dtype) -> Iterator[str]:
    """STEPS steps: in each four bytes of every row, one or two inputs, times their weights of 32 outputs."""
    kind, multiply = "<16 x float>", "@llvm.fma.v16f32(<16 x float> {w}, <16 x float> {x}, <16 x float> {s})"
    if dtype == torch.bfloat16:
        kind = "<32 x bfloat>"
        multiply = "@llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> {s}, <32 x bfloat> {w}, <32 x bfloat> {x})"
    yield f"  %wbytes = mul i64 %turn, {4 * COLUMNS * STEPS}"
    yield "  %wturn = getelementptr i8, ptr %w, i64 %wbytes"
    yield "  %aturn = getelementptr i8, ptr %ahead, i64 %wbytes"
    yield f"  %xbytes = mul i64 %turn, {4 * STEPS}"
    yield "  %xturn = getelementptr i8, ptr %x, i64 %xbytes"
    sums = {(row, half): f"%s{row}.{half}" for row in range(rows) for half in (0, 1)}
    for step in range(STEPS):
        yield from prefetched("%aturn", 128 * step, 128 * (step + 1))
        for half in (0, 1):
            yield from loaded(f"%w{step}.{half}", "%wturn", 128 * step + 64 * half, kind, 64)
        for row in range(rows):
            at = f"{step}.{row}"
            yield from loaded(f"%i{at}", "%xturn", 4 * (steps * row + step), "i32")
            yield from splat(f"%e{at}", f"%i{at}", "i32")
            yield f"  %x{at} = bitcast <16 x i32> %e{at} to {kind}"
            for half in (0, 1):
                call = multiply.format(w=f"%w{step}.{half}", x=f"%x{at}", s=sums[row, half])
                sums[row, half] = f"%z{row}.{half}" + f".{step}" * (step < STEPS - 1)
                yield f"  {sums[row, half]} = call <16 x float> {call}"
