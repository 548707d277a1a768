"""The kernel of `paceline.target.integer`, in LLVM's language: rounding x, and a panel times up to 12 rows.

A panel is 16 outputs. Along its inputs it is cut into units of 2 or 8 blocks of 32 inputs: first scales, then lines of
64 bytes, each with four codes of every output. Rows are dealt out evenly to as few tiles as will do; of a tile the
rounded rows lie side by side, block by block, each a record: 32 whole numbers, their scale, and what the sum of a block
begins with.

Knows nothing of torch but of its dtypes and its threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from string import Template
from typing import Any

import llvmlite.binding as llvm
import torch

from paceline.target import integer_source, panel_source
from paceline.target.blocks import Q4_0, Q4_K, Q6_K, Q8_0, Kind
from paceline.target.products import parallel

COLUMNS = 16
"""Outputs of a panel. With 32, twelve rows' sums do not fit into the registers."""
ROWS = 12
"""Most rows of a tile: each takes two registers of 32, the sum and that of the block at hand."""
SLOW_ROWS = 4
"""The same without VNNI: a row takes so many instructions that larger tiles are hardly faster, and they take seconds
to compile."""
AHEAD = 4096
"""Bytes by which a panel is prefetched."""
PAIR = 2
"""Blocks of a turn of the innermost loop: in Q4_K two blocks share their bytes."""


@dataclass(frozen=True)
class Unit:
    """What a unit of a panel holds of each output.

    blocks  of 32 inputs. halves, bytes, words: how many numbers of two, one and four bytes.
    record  bytes of a block of a rounded row."""

    blocks: int
    halves: int
    bytes: int
    words: int
    record: int

    @property
    def header(self) -> int:
        """Bytes before the lines, of all outputs."""
        return COLUMNS * (2 * self.halves + self.bytes)

    @property
    def nbytes(self) -> int:
        """Of all outputs; a multiple of a cache line's 64."""
        return self.header + 4 * COLUMNS * self.words


UNITS = {
    Q8_0: Unit(2, 2, 0, 16, 40),
    Q4_0: Unit(2, 2, 0, 8, 40),
    Q4_K: Unit(8, 2, 16, 32, 40),
    Q6_K: Unit(8, 2, 16, 64, 44),
}


@cache
def compiled(kind: Kind, dtype: torch.dtype, vnni: bool) -> Callable[..., None]:
    """product(x, records, panels, bias, out, rows, blocks, units, outputs, stride, threads): addresses, and numbers.

    blocks: of a row of x; units: of a panel; stride: bytes from one row of `out` to the next."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if parallel() is not None:
        llvm.add_symbol("GOMP_parallel", parallel())
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="pic", jit=True
    )
    module = llvm.parse_assembly("\n".join(_source(kind, dtype, vnni)))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    product: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(engine.get_function_address("product"))
    product.engine = engine  # the code lives as long as its engine
    return product


def _source(kind: Kind, dtype: torch.dtype, vnni: bool) -> Iterator[str]:
    yield panel_source.PREAMBLE + integer_source.PREAMBLE
    yield from _rounding(kind, dtype)
    most = ROWS if vnni else SLOW_ROWS
    for rows in range(1, most + 1):
        yield from _tile(kind, rows, dtype, vnni)
    tiles = ", ".join(f"ptr @tile{rows}" for rows in range(1, most + 1))
    yield f"@tiles = internal constant [{most} x ptr] [{tiles}]"
    unit = UNITS[kind]
    yield Template(panel_source.PRODUCT + integer_source.PRODUCT).substitute(
        ROWS=most,
        UP=most - 1,
        COLUMNS=COLUMNS,
        OVER=COLUMNS - 1,
        ITEMSIZE=dtype.itemsize,
        UNIT=unit.nbytes,
        ROW_UNIT=unit.blocks * unit.record,
        RECORD=unit.record,
        AHEAD=AHEAD,
        RUN=_run(),
    )


def _run() -> str:
    """A call of `work` on all threads, or on this one where torch has another OpenMP than GNU's."""
    return panel_source.ON_THIS_THREAD if parallel() is None else panel_source.ON_ALL_THREADS


# Pieces of vectors ---------------------------------------------------------------------------------------------------

_LANES = ", ".join(f"i64 {i}" for i in range(COLUMNS))


def _splat(name: str, value: str, kind: str) -> Iterator[str]:
    yield f"  {name}.0 = insertelement <16 x {kind}> poison, {kind} {value}, i64 0"
    yield f"  {name} = shufflevector <16 x {kind}> {name}.0, <16 x {kind}> poison, <16 x i32> zeroinitializer"


def _loaded(name: str, base: str, at: int, kind: str, align: int = 4) -> Iterator[str]:
    yield f"  {name}.p = getelementptr i8, ptr {base}, i64 {at}"
    yield f"  {name} = load {kind}, ptr {name}.p, align {align}"


def _constant(value: str, kind: str) -> str:
    return "<" + ", ".join([f"{kind} {value}"] * COLUMNS) + ">"


# Rounding ------------------------------------------------------------------------------------------------------------


def _rounding(kind: Kind, dtype: torch.dtype) -> Iterator[str]:
    """@round(x, record, stride, blocks): one row, and records that are `stride` bytes apart."""
    yield "define internal void @round(ptr %x, ptr %records, i64 %stride, i64 %blocks) {"
    yield "entry:"
    yield "  br label %loop"
    yield "loop:"
    yield "  %b = phi i64 [0, %entry], [%next, %loop]"
    yield f"  %x.at = mul i64 %b, {32 * dtype.itemsize}"
    yield "  %from = getelementptr i8, ptr %x, i64 %x.at"
    yield "  %r.at = mul i64 %b, %stride"
    yield "  %to = getelementptr i8, ptr %records, i64 %r.at"
    for half in (0, 1):
        yield from _floats(half, dtype)
        yield f"  %size{half} = and <16 x i32> %bits{half}, {_constant('2147483647', 'i32')}"
    # As whole numbers sizes are in order too, and what is no number is above all.
    yield "  %sizes = call <16 x i32> @llvm.umax.v16i32(<16 x i32> %size0, <16 x i32> %size1)"
    yield "  %top = call i32 @llvm.vector.reduce.umax.v16i32(<16 x i32> %sizes)"
    yield "  %finite = icmp ult i32 %top, 2139095040"
    yield "  %max = bitcast i32 %top to float"
    yield "  %d.some = fdiv float %max, 127.0"
    yield "  %d = select i1 %finite, float %d.some, float 0x7FF8000000000000"
    yield "  %some = fcmp ogt float %d, 0.0"
    yield from _splat("%by", "%d", "float")
    yield from _splat("%any", "%some", "i1")
    for half in (0, 1):
        yield f"  %v{half} = bitcast <16 x i32> %bits{half} to <16 x float>"
        yield f"  %n{half} = fdiv <16 x float> %v{half}, %by"
        yield f"  %r{half} = call <16 x float> @llvm.rint.v16f32(<16 x float> %n{half})"
        yield f"  %k{half} = select <16 x i1> %any, <16 x float> %r{half}, <16 x float> zeroinitializer"
        yield f"  %q{half} = fptosi <16 x float> %k{half} to <16 x i32>"
        yield f"  %c{half} = trunc <16 x i32> %q{half} to <16 x i8>"
        yield f"  %c{half}.p = getelementptr i8, ptr %to, i64 {16 * half}"
        yield f"  store <16 x i8> %c{half}, ptr %c{half}.p, align 4"
        yield f"  %s{half} = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %q{half})"
    yield from _begun(kind)
    yield "  %next = add nuw nsw i64 %b, 1"
    yield "  %more = icmp ult i64 %next, %blocks"
    yield "  br i1 %more, label %loop, label %done"
    yield "done:"
    yield "  ret void"
    yield "}"


def _floats(half: int, dtype: torch.dtype) -> Iterator[str]:
    """Bits of 16 numbers as float32."""
    at = 16 * dtype.itemsize * half
    if dtype == torch.float32:
        yield from _loaded(f"%bits{half}", "%from", at, "<16 x i32>")
        return
    yield from _loaded(f"%narrow{half}", "%from", at, "<16 x i16>", 2)
    yield f"  %wide{half} = zext <16 x i16> %narrow{half} to <16 x i32>"
    yield f"  %bits{half} = shl <16 x i32> %wide{half}, {_constant('16', 'i32')}"


def _begun(kind: Kind) -> Iterator[str]:
    """The scale, and what the block's sums begin with; for Q4_K, which has minima, -d * sum(q)."""
    places = {32: "float %d"}
    if kind == Q6_K:
        yield f"  %begin0 = mul i32 %s0, {-kind.offset}"
        yield f"  %begin1 = mul i32 %s1, {-kind.offset}"
        places |= {36: "i32 %begin0", 40: "i32 %begin1"}
    else:
        yield "  %s = add i32 %s0, %s1"
        if kind == Q4_K:
            yield "  %sf = sitofp i32 %s to float"
            yield "  %less = fmul float %d, %sf"
            yield "  %begin = fneg float %less"
        else:
            yield f"  %begin = mul i32 %s, {-kind.offset}"
        places[36] = "float %begin" if kind == Q4_K else "i32 %begin"
    for at, value in places.items():
        yield f"  %at{at} = getelementptr i8, ptr %to, i64 {at}"
        yield f"  store {value}, ptr %at{at}, align 4"


# A tile --------------------------------------------------------------------------------------------------------------


def _tile(kind: Kind, rows: int, dtype: torch.dtype, vnni: bool) -> Iterator[str]:
    """Records of `rows` rows times one panel: sums in registers, from a bias to a store of `columns` at most."""
    unit = UNITS[kind]
    turns = unit.blocks // PAIR
    takes = "ptr %x, ptr %w, ptr %ahead, ptr %bias, ptr %y, i64 %stride, i64 %columns, i64 %units"
    yield f"define internal void @tile{rows}({takes}) {{"
    yield "entry:"
    yield "  %b = load <16 x float>, ptr %bias, align 64"
    yield f"  %pairs = mul i64 %units, {turns}"
    yield "  br label %loop"
    yield "loop:"
    yield "  %pair = phi i64 [0, %entry], [%next, %loop]"
    for row in range(rows):
        yield f"  %s{row} = phi <16 x float> [%b, %entry], [%s{row}.b{PAIR - 1}, %loop]"
    yield f"  %unit = udiv i64 %pair, {turns}"
    yield f"  %turn = urem i64 %pair, {turns}"
    yield f"  %unit.at = mul i64 %unit, {unit.nbytes}"
    yield "  %wu = getelementptr i8, ptr %w, i64 %unit.at"
    yield f"  %lines.at = mul i64 %turn, {4 * COLUMNS * unit.words // turns}"
    yield "  %wl = getelementptr i8, ptr %wu, i64 %lines.at"
    yield f"  %scales.at = mul i64 %turn, {PAIR * COLUMNS * (2 if kind == Q6_K else 1)}"
    yield "  %ws = getelementptr i8, ptr %wu, i64 %scales.at"
    yield f"  %x.at = mul i64 %pair, {PAIR * rows * unit.record}"
    yield "  %xp = getelementptr i8, ptr %x, i64 %x.at"
    yield f"  %a.at = mul i64 %pair, {unit.nbytes // turns}"
    yield "  %ap = getelementptr i8, ptr %ahead, i64 %a.at"
    for line in range(0, unit.nbytes // turns, 64):
        yield f"  %a{line} = getelementptr i8, ptr %ap, i64 {line}"
        yield f"  call void @llvm.prefetch.p0(ptr %a{line}, i32 0, i32 2, i32 1)"
    for block in range(PAIR):
        yield from _block(kind, block, rows, vnni)
    yield "  %next = add nuw nsw i64 %pair, 1"
    yield "  %more = icmp ult i64 %next, %pairs"
    yield "  br i1 %more, label %loop, label %store"
    yield "store:"
    yield from _stores(rows, dtype)
    yield "  ret void"
    yield "}"


def _block(kind: Kind, block: int, rows: int, vnni: bool) -> Iterator[str]:
    """The sums of a block, scaled and added to those before it."""
    before = {row: f"%s{row}" if block == 0 else f"%s{row}.b{block - 1}" for row in range(rows)}
    parts = 2 if kind == Q6_K else 1
    for part in range(parts):
        at = f"{block}.{part}"
        yield from _scale(kind, block, part)
        yield from _codes(kind, block, part)
        groups = range(part * 8 // parts, (part + 1) * 8 // parts)
        for row in range(rows):
            start = (block * rows + row) * UNITS[kind].record
            if kind == Q4_K:
                yield f"  %t{at}.{row}.{groups[0]} = add <16 x i32> zeroinitializer, zeroinitializer"
            else:
                yield from _loaded(f"%c{at}.{row}", "%xp", start + 36 + 4 * part, "i32")
                yield from _splat(f"%t{at}.{row}.{groups[0]}", f"%c{at}.{row}", "i32")
        for group in groups:
            for row in range(rows):
                start = (block * rows + row) * UNITS[kind].record
                yield from _loaded(f"%q{at}.{row}.{group}", "%xp", start + 4 * group, "i32")
                yield from _dot(f"{at}.{row}.{group}", f"{at}.{row}.{group + 1}", f"{block}.{group}", vnni)
        for row in range(rows):
            start = (block * rows + row) * UNITS[kind].record
            done = f"%s{row}.b{block}" if part == parts - 1 else f"%h{at}.{row}"
            yield from _loaded(f"%d{at}.{row}", "%xp", start + 32, "float")
            yield from _splat(f"%ds{at}.{row}", f"%d{at}.{row}", "float")
            yield f"  %f{at}.{row} = sitofp <16 x i32> %t{at}.{row}.{groups[-1] + 1} to <16 x float>"
            yield f"  %g{at}.{row} = fmul <16 x float> %scale{at}, %ds{at}.{row}"
            gain = f"%less{at}.{row}" if kind == Q4_K else done
            yield _fma(gain, f"%f{at}.{row}", f"%g{at}.{row}", before[row])
            if kind == Q4_K:
                yield from _loaded(f"%m{at}.{row}", "%xp", start + 36, "float")
                yield from _splat(f"%ms{at}.{row}", f"%m{at}.{row}", "float")
                yield _fma(done, f"%least{at}", f"%ms{at}.{row}", gain)
            before[row] = done


def _fma(name: str, a: str, b: str, c: str) -> str:
    return f"  {name} = call <16 x float> @llvm.fma.v16f32(<16 x float> {a}, <16 x float> {b}, <16 x float> {c})"


def _scale(kind: Kind, block: int, part: int) -> Iterator[str]:
    """%scale, and of Q4_K %least, the minimum: float32 of 16 outputs."""
    at = f"{block}.{part}"
    if kind in (Q8_0, Q4_0):
        yield from _loaded(f"%half{at}", "%wu", 32 * block, "<16 x half>", 32)
        yield f"  %scale{at} = fpext <16 x half> %half{at} to <16 x float>"
        return
    bytes_at = 32 * UNITS[kind].halves
    if kind == Q4_K:
        fields = {"scale": (0, bytes_at + COLUMNS * block), "least": (32, bytes_at + COLUMNS * (8 + block))}
    else:
        fields = {"scale": (0, bytes_at + COLUMNS * (PAIR * block + part))}
    for name, (half_at, byte_at) in fields.items():
        yield from _loaded(f"%{name}{at}.h", "%wu", half_at, "<16 x half>", 32)
        yield from _loaded(f"%{name}{at}.b", "%ws", byte_at, "<16 x i8>", 16)
        yield f"  %{name}{at}.f = fpext <16 x half> %{name}{at}.h to <16 x float>"
        widen = "uitofp" if kind == Q4_K else "sitofp"
        yield f"  %{name}{at}.n = {widen} <16 x i8> %{name}{at}.b to <16 x float>"
        yield f"  %{name}{at} = fmul <16 x float> %{name}{at}.f, %{name}{at}.n"


def _codes(kind: Kind, block: int, part: int) -> Iterator[str]:
    """%w{block}.{group}: codes of 16 outputs and four inputs, for this part's groups."""
    header, low = UNITS[kind].header, _constant(str(0x0F0F0F0F), "i32")
    if kind in (Q8_0, Q6_K):
        for group in range(8) if kind == Q8_0 else range(4 * part, 4 * part + 4):
            yield from _loaded(f"%w{block}.{group}", "%wl", header + 64 * (8 * block + group), "<16 x i32>", 64)
        return
    for group in range(8):
        # Of Q4_0 a line has the groups g (low) and g + 4; of Q4_K the same group of two blocks.
        line, high = (4 * block + group % 4, group > 3) if kind == Q4_0 else (group, block == 1)
        at = f"{block}.{group}"
        yield from _loaded(f"%l{at}", "%wl", header + 64 * line, "<16 x i32>", 64)
        if high:
            yield f"  %l{at}.h = lshr <16 x i32> %l{at}, {_constant('4', 'i32')}"
        yield f"  %w{at} = and <16 x i32> %l{at}{'.h' if high else ''}, {low}"


def _dot(before: str, after: str, weights: str, vnni: bool) -> Iterator[str]:
    """%t{after} = %t{before} + four unsigned codes times four signed numbers, for 16 outputs."""
    if vnni:
        yield from _splat(f"%e{before}", f"%q{before}", "i32")
        vectors = f"<16 x i32> %t{before}, <16 x i32> %w{weights}, <16 x i32> %e{before}"
        yield f"  %t{after} = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512({vectors})"
        return
    total = f"%t{before}"
    for k in range(4):
        at = f"{before}.{k}"
        yield f"  %xu{at} = shl i32 %q{before}, {24 - 8 * k}"
        yield f"  %xs{at} = ashr i32 %xu{at}, 24"
        yield from _splat(f"%xb{at}", f"%xs{at}", "i32")
        yield f"  %wu{at} = lshr <16 x i32> %w{weights}, {_constant(str(8 * k), 'i32')}"
        yield f"  %wb{at} = and <16 x i32> %wu{at}, {_constant('255', 'i32')}"
        yield f"  %m{at} = mul <16 x i32> %wb{at}, %xb{at}"
        done = f"%t{after}" if k == 3 else f"%sum{at}"
        yield f"  {done} = add <16 x i32> {total}, %m{at}"
        total = done


def _stores(rows: int, dtype: torch.dtype) -> Iterator[str]:
    """Sums, rounded to the dtype, to their places."""
    yield from _splat("%ends", "%columns", "i64")
    yield f"  %mask = icmp slt <16 x i64> <{_LANES}>, %ends"
    for row in range(rows):
        value, kind, name = f"%s{row}.b{PAIR - 1}", "<16 x float>", "v16f32"
        yield f"  %o{row} = mul i64 %stride, {row}"
        yield f"  %y{row} = getelementptr i8, ptr %y, i64 %o{row}"
        if dtype == torch.bfloat16:
            yield f"  %n{row} = fptrunc <16 x float> {value} to <16 x bfloat>"
            yield f"  %h{row} = bitcast <16 x bfloat> %n{row} to <16 x i16>"
            value, kind, name = f"%h{row}", "<16 x i16>", "v16i16"
        yield (
            f"  call void @llvm.masked.store.{name}.p0({kind} {value}, ptr %y{row}, i32 {dtype.itemsize}, "
            "<16 x i1> %mask)"
        )
