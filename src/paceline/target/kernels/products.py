"""x @ weight.T with one order of sums for any number of rows: in bfloat16 on CPUs with AVX-512 BF16, and in float32.

So a token's logits are the same, bit for bit, alone and in a draft (docs/exact.md). In bfloat16 this is also faster on
CPUs without AMX tiles, such as Zen 4: oneDNN reads weights there at two thirds of the memory's speed, and does not
compute while it reads for two to sixteen rows, as in verifying a draft (docs/measurements.md, "Products"). Here weights
are stored in panels of 32 outputs, in the order of use. Up to 12 rows are summed in registers while a panel is read;
with more rows, the last ones prefetch the next panel.

The kernel is LLVM code, because Numba lacks the instruction. It runs on the threads of torch's OpenMP, because two
thread pools would compete for the cores. `integer.py` uses the same frame (`module`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from string import Template
from typing import Any

import llvmlite.binding as llvm
import torch

from paceline.target import kernels

AHEAD = 4096
"""Distance of the prefetch into the L2 cache, in bytes: a page, where the processor's own prefetch ends."""

# The frame of a kernel -----------------------------------------------------------------------------------------------

_DECLARATIONS = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, i32, <16 x i1>)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)
declare void @GOMP_parallel(ptr, ptr, i32, i32)

; rows, panels, bias, y, number of rows, outputs, stride of y, units, panels taken at once, next panel
%Work = type { ptr, ptr, ptr, ptr, i64, i64, i64, i64, i64, i64 }
; rows of a tile, and how many tiles have one more
%Deal = type { i64, i64 }
"""

# Rows are dealt evenly to as few tiles as possible. Each thread takes a few panels at a time, so that a slow thread
# does not hold up the others.
_FRAME = """
define internal %Deal @deal(i64 %rows) {
  %up = add i64 %rows, $UP
  %tiles = udiv i64 %up, $ROWS
  %few = udiv i64 %rows, %tiles
  %extra = urem i64 %rows, %tiles
  %some = insertvalue %Deal poison, i64 %few, 0
  %deal = insertvalue %Deal %some, i64 %extra, 1
  ret %Deal %deal
}

; the first row after the first %tiles tiles
define internal i64 @end_of(%Deal %deal, i64 %tiles) {
  %few = extractvalue %Deal %deal, 0
  %extra = extractvalue %Deal %deal, 1
  %least = mul i64 %few, %tiles
  %more = call i64 @llvm.umin.i64(i64 %extra, i64 %tiles)
  %end = add i64 %least, %more
  ret i64 %end
}

define internal void @work(ptr %work) {
entry:
  %all = load %Work, ptr %work
  %x = extractvalue %Work %all, 0
  %w = extractvalue %Work %all, 1
  %bias = extractvalue %Work %all, 2
  %y = extractvalue %Work %all, 3
  %rows = extractvalue %Work %all, 4
  %outputs = extractvalue %Work %all, 5
  %stride = extractvalue %Work %all, 6
  %units = extractvalue %Work %all, 7
  %chunk = extractvalue %Work %all, 8
  %next = getelementptr %Work, ptr %work, i64 0, i32 9
  %ceil = add i64 %outputs, $OVER
  %panels = udiv i64 %ceil, $COLUMNS
  %deal = call %Deal @deal(i64 %rows)
  %first.end = call i64 @end_of(%Deal %deal, i64 1)
  %alone = icmp eq i64 %first.end, %rows
  %panel.bytes = mul i64 %units, $UNIT
  %row.bytes = mul i64 %units, $ROW_UNIT
  %away = select i1 %alone, i64 $AHEAD, i64 %panel.bytes
  br label %take
take:
  %begin = atomicrmw add ptr %next, i64 %chunk monotonic
  %some = icmp ult i64 %begin, %panels
  br i1 %some, label %taken, label %done
taken:
  %wanted = add i64 %begin, %chunk
  %end = call i64 @llvm.umin.i64(i64 %wanted, i64 %panels)
  br label %panel
panel:
  %p = phi i64 [%begin, %taken], [%p.next, %panel.done]
  %w.offset = mul i64 %p, %panel.bytes
  %w.panel = getelementptr i8, ptr %w, i64 %w.offset
  %w.away = getelementptr i8, ptr %w.panel, i64 %away
  %column = mul i64 %p, $COLUMNS
  %bias.panel = getelementptr float, ptr %bias, i64 %column
  %y.offset = mul i64 %column, $ITEMSIZE
  %y.panel = getelementptr i8, ptr %y, i64 %y.offset
  %columns = sub i64 %outputs, %column
  br label %tile
tile:
  %t = phi i64 [0, %panel], [%t.next, %tile]
  %row = phi i64 [0, %panel], [%row.next, %tile]
  %t.next = add i64 %t, 1
  %row.next = call i64 @end_of(%Deal %deal, i64 %t.next)
  %t.more = icmp ult i64 %row.next, %rows
  ; the last tile of a panel prefetches what comes after the panel
  %ahead = select i1 %t.more, ptr %w.panel, ptr %w.away
  %x.bytes = mul i64 %row, %row.bytes
  %x.tile = getelementptr i8, ptr %x, i64 %x.bytes
  %y.bytes = mul i64 %row, %stride
  %y.tile = getelementptr i8, ptr %y.panel, i64 %y.bytes
  %here = sub i64 %row.next, %row
  %which = sub i64 %here, 1
  %tile.at = getelementptr [$ROWS x ptr], ptr @tiles, i64 0, i64 %which
  %kernel = load ptr, ptr %tile.at
  call void %kernel(ptr %x.tile, ptr %w.panel, ptr %ahead, ptr %bias.panel, ptr %y.tile,
                    i64 %stride, i64 %columns, i64 %units)
  br i1 %t.more, label %tile, label %panel.done
panel.done:
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, %end
  br i1 %p.more, label %panel, label %take
done:
  ret void
}

define internal void @run(ptr %x, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %outputs,
                          i64 %stride, i64 %units, i64 %threads) {
  %work = alloca %Work, align 64
  %ceil = add i64 %outputs, $OVER
  %panels = udiv i64 %ceil, $COLUMNS
  %parts = mul i64 %threads, 4
  %part = udiv i64 %panels, %parts
  %chunk = call i64 @llvm.umax.i64(i64 %part, i64 1)
  %w0 = insertvalue %Work poison, ptr %x, 0
  %w1 = insertvalue %Work %w0, ptr %w, 1
  %w2 = insertvalue %Work %w1, ptr %bias, 2
  %w3 = insertvalue %Work %w2, ptr %y, 3
  %w4 = insertvalue %Work %w3, i64 %rows, 4
  %w5 = insertvalue %Work %w4, i64 %outputs, 5
  %w6 = insertvalue %Work %w5, i64 %stride, 6
  %w7 = insertvalue %Work %w6, i64 %units, 7
  %w8 = insertvalue %Work %w7, i64 %chunk, 8
  %w9 = insertvalue %Work %w8, i64 0, 9
  store %Work %w9, ptr %work
  %count = trunc i64 %threads to i32
  $RUN
  ret void
}
"""


def module(
    declarations: str,
    functions: Iterable[str],
    entry: str,
    *,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    unit: int,
    row_unit: int,
    **numbers: int,
) -> str:
    """A kernel as LLVM code.

    functions       include @tile1 to @tileN for N = `rows`: @tile3 multiplies 3 adjacent rows by a panel of `columns`
                    outputs.
    entry           the function @product, which calls @run.
    unit, row_unit  bytes of a unit of a panel and of a row; @run is given the length of both in units.
    numbers         values for further names with a dollar in `entry`."""
    tiles = ", ".join(f"ptr @tile{number}" for number in range(1, rows + 1))
    on_all_threads = "call void @GOMP_parallel(ptr @work, ptr %work, i32 %count, i32 0)"
    filled = Template(_FRAME + entry).substitute(
        ROWS=rows,
        UP=rows - 1,
        COLUMNS=columns,
        OVER=columns - 1,
        ITEMSIZE=dtype.itemsize,
        UNIT=unit,
        ROW_UNIT=row_unit,
        AHEAD=AHEAD,
        RUN="call void @work(ptr %work)" if kernels.parallel() is None else on_all_threads,
        **numbers,
    )
    table = f"@tiles = internal constant [{rows} x ptr] [{tiles}]"
    return "\n".join([_DECLARATIONS + declarations, *functions, table, filled])


def compiled(source: str, arguments: int) -> Callable[..., None]:
    """The function @product of a module; arguments: their number, addresses and integers."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if kernels.parallel() is not None:
        llvm.add_symbol("GOMP_parallel", kernels.parallel())
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="pic", jit=True
    )
    parsed = llvm.parse_assembly(source)
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    product: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(engine.get_function_address("product"))
    product.engine = engine  # the code lives as long as its engine
    return product


def splat(name: str, value: str, kind: str) -> Iterator[str]:
    """A vector of 16 times `value`."""
    yield f"  {name}.0 = insertelement <16 x {kind}> poison, {kind} {value}, i64 0"
    yield f"  {name} = shufflevector <16 x {kind}> {name}.0, <16 x {kind}> poison, <16 x i32> zeroinitializer"


def constant(value: int, kind: str) -> str:
    """A literal vector of 16 times `value`."""
    return "<" + ", ".join([f"{kind} {value}"] * 16) + ">"


def masks(halves: int) -> Iterator[str]:
    """%mask0, and %mask1 for 32 columns: which of 16 outputs are below %columns."""
    for half in range(halves):
        yield f"  %left{half} = sub i64 %columns, {16 * half}"
        yield from splat(f"%ends{half}", f"%left{half}", "i64")
        yield f"  %mask{half} = icmp slt <16 x i64> <{', '.join(f'i64 {i}' for i in range(16))}>, %ends{half}"


def store(at: str, row: int, half: int, value: str, dtype: torch.dtype) -> Iterator[str]:
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

_PRODUCT = """
define void @product(ptr %x, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %outputs, i64 %threads) {
  %stride = mul i64 %outputs, $ITEMSIZE
  call void @run(ptr %x, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %outputs,
                 i64 %stride, i64 $STEPS, i64 %threads)
  ret void
}
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
        self._product = _product(self.width // inputs, weight.dtype)
        self._at = self._panels.data_ptr(), self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] @ weight.T + bias, [rows, outputs], in the weight's dtype."""
        x, rows = x.contiguous(), len(x)
        out = x.new_empty(rows, self.outputs)
        if rows:
            self._product(x.data_ptr(), *self._at, out.data_ptr(), rows, self.outputs, torch.get_num_threads())
        return out

    def dense(self) -> torch.Tensor:
        """The weight [outputs, width]."""
        return self._panels.transpose(1, 2).reshape(-1, self.width)[: self.outputs].contiguous()


@cache
def _product(steps: int, dtype: torch.dtype) -> Callable[..., None]:
    """product(x, panels, bias, out, rows, outputs, threads), addresses and integers, for rows of `steps` steps."""
    return compiled(_source(steps, dtype), 7)


def _source(steps: int, dtype: torch.dtype) -> str:
    tiles = (line for rows in range(1, ROWS + 1) for line in _tile(rows, steps, dtype))
    unit = {"unit": 4 * COLUMNS, "row_unit": 4}
    return module(_DOTS, tiles, _PRODUCT, rows=ROWS, columns=COLUMNS, dtype=dtype, **unit, STEPS=steps)


def _tile(rows: int, steps: int, dtype: torch.dtype) -> Iterator[str]:
    """@tileN for N = `rows`: rows times one panel, plus the bias, with sums in registers; stores `columns` at most."""
    sums = [(row, half) for row in range(rows) for half in (0, 1)]
    takes = "ptr %x, ptr %w, ptr %ahead, ptr %bias, ptr %y, i64 %stride, i64 %columns, i64 %units"
    yield f"define internal void @tile{rows}({takes}) {{"
    yield "entry:"
    for half in (0, 1):
        yield f"  %bias{half} = getelementptr float, ptr %bias, i64 {16 * half}"
        yield f"  %b{half} = load <16 x float>, ptr %bias{half}, align 64"
    yield "  br label %loop"
    yield "loop:"
    yield "  %step = phi i64 [0, %entry], [%next, %loop]"
    for row, half in sums:
        yield f"  %s{row}.{half}.0 = phi <16 x float> [%b{half}, %entry], [%s{row}.{half}.{STEPS}, %loop]"
    yield "  %wbytes = shl i64 %step, 7"
    yield "  %wpair = getelementptr i8, ptr %w, i64 %wbytes"
    yield "  %apair = getelementptr i8, ptr %ahead, i64 %wbytes"
    yield "  %xbytes = shl i64 %step, 2"
    yield "  %xpair = getelementptr i8, ptr %x, i64 %xbytes"
    for step in range(STEPS):
        yield from _step(step, rows, steps, dtype)
    yield f"  %next = add nuw nsw i64 %step, {STEPS}"
    yield f"  %more = icmp ult i64 %next, {steps}"
    yield "  br i1 %more, label %loop, label %store"
    yield "store:"
    yield from masks(2)
    for row, half in sums:
        yield from store(f"{row}.{half}", row, half, f"%s{row}.{half}.{STEPS}", dtype)
    yield "  ret void"
    yield "}"


def _step(step: int, rows: int, steps: int, dtype: torch.dtype) -> Iterator[str]:
    """One step: four bytes of every row, one or two inputs, times their weights of 32 outputs."""
    kind, multiply = "<16 x float>", "@llvm.fma.v16f32(<16 x float> {w}, <16 x float> {x}, <16 x float> {s})"
    if dtype == torch.bfloat16:
        kind = "<32 x bfloat>"
        multiply = "@llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> {s}, <32 x bfloat> {w}, <32 x bfloat> {x})"
    for half in (0, 1):
        at, byte = f"{step}.{half}", 128 * step + 64 * half
        yield f"  %a{at} = getelementptr i8, ptr %apair, i64 {byte}"
        yield f"  call void @llvm.prefetch.p0(ptr %a{at}, i32 0, i32 2, i32 1)"
        yield f"  %p{at} = getelementptr i8, ptr %wpair, i64 {byte}"
        yield f"  %w{at} = load {kind}, ptr %p{at}, align 64"
    for row in range(rows):
        at = f"{step}.{row}"
        yield f"  %q{at} = getelementptr i8, ptr %xpair, i64 {4 * (steps * row + step)}"
        yield f"  %i{at} = load i32, ptr %q{at}, align 4"
        yield f"  %v{at} = insertelement <16 x i32> poison, i32 %i{at}, i64 0"
        yield f"  %e{at} = shufflevector <16 x i32> %v{at}, <16 x i32> poison, <16 x i32> zeroinitializer"
        yield f"  %x{at} = bitcast <16 x i32> %e{at} to {kind}"
        for half in (0, 1):
            call = multiply.format(w=f"%w{step}.{half}", x=f"%x{at}", s=f"%s{row}.{half}.{step}")
            yield f"  %s{row}.{half}.{step + 1} = call <16 x float> {call}"
