"""x @ weight.T over few rows or many, every sum in one order: bfloat16 on CPUs that have dot products for it, float32.

On CPUs without tiles, such as Zen 4, this is also the faster way in bfloat16: oneDNN reads weights there at two thirds
of the memory's speed, and for two to sixteen rows, as in verifying a draft, it does not compute while it reads
(docs/measurements.md, "Products"). Here weights are stored in panels of 32 outputs, in the order of use. Up to 12 rows
are summed in registers while a panel is read; with more, the last ones prefetch the next panel while they compute.
Every sum has the same order for any number of rows, so a token's logits are the same, bit for bit, alone and in a
draft (docs/exact.md).

The kernel is written in LLVM's language, because Numba, which includes the compiler, lacks the instruction. It runs on
the threads of torch's OpenMP, because two thread pools would wait for each other's cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import llvmlite.binding as llvm
import torch

from paceline.target.kernels import panels as panel_source

COLUMNS = 32
"""Outputs of a panel, which fill two registers of AVX-512."""
ROWS = 12 if llvm.get_host_cpu_features().get("avx512f") else 3
"""Most rows at once: sums fill 24 of AVX-512's 32 registers, or 12 of 16 of half the width."""
STEPS = 4
"""Steps of the innermost loop. A step takes four bytes of a row: two inputs in bfloat16, one in float32."""
PER_STEP = {torch.bfloat16: 2, torch.float32: 1}
"""Inputs of a step."""
AHEAD = 4096
"""Bytes by which a panel is prefetched into the second-level cache: a page, where the processor's own prefetch ends."""


def supported(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernel runs here: it needs AVX-512 BF16 (for float32 AVX2), a compiler that knows it, and torch on
    GNU's OpenMP."""
    features = llvm.get_host_cpu_features()
    has_units = {
        torch.bfloat16: bool(features.get("avx512bf16")),
        torch.float32: bool(features.get("avx2")) and bool(features.get("fma")),
    }
    return has_units.get(dtype, False) and llvm.llvm_version_info >= (18,) and parallel() is not None


@cache
def preferred(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernel is faster here than torch's libraries: on CPUs with AVX-512 BF16 and without tiles (AMX). In
    float32 that is an EPYC or Ryzen, on which MKL takes two to four times as long (docs/exact.md)."""
    return supported() and supported(dtype) and not llvm.get_host_cpu_features().get("amx-bf16")


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernel takes these weights [outputs, width]."""
    inputs = PER_STEP.get(weight.dtype)
    return weight.device.type == "cpu" and inputs is not None and weight.shape[1] % (inputs * STEPS) == 0


class Panels:
    """A weight [outputs, width] that `fits`, and a bias [outputs] or None, as the kernel reads them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.outputs, self.width = weight.shape
        room = -(-self.outputs // COLUMNS) * COLUMNS
        rows = torch.zeros(room, self.width, dtype=weight.dtype)
        rows[: self.outputs] = weight
        inputs = PER_STEP[weight.dtype]
        self._panels = rows.view(-1, COLUMNS, self.width // inputs, inputs).transpose(1, 2).contiguous()
        self._bias = torch.zeros(room)
        if bias is not None:
            self._bias[: self.outputs] = bias
        self._product = _compiled(self.width // inputs, weight.dtype)
        self._at = self._panels.data_ptr(), self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] @ weight.T + bias, [rows, outputs], in the weight's dtype."""
        x, rows = x.contiguous(), len(x)
        out = x.new_empty(rows, self.outputs)
        if rows:
            self._product(x.data_ptr(), *self._at, out.data_ptr(), rows, self.outputs, torch.get_num_threads())
        return out

    def dense(self) -> torch.Tensor:
        """The weight as it was."""
        return self._panels.transpose(1, 2).reshape(-1, self.width)[: self.outputs].contiguous()


# Compiling -----------------------------------------------------------------------------------------------------------


@cache
def parallel() -> int | None:
    """Address of the function that runs a task on the threads of torch's OpenMP."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    libraries = {line.split()[-1] for line in maps.splitlines() if "gomp" in line}
    for library in sorted(libraries, key=lambda path: "torch" not in path):
        try:
            return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@cache
def _compiled(steps: int, dtype: torch.dtype) -> Callable[..., None]:
    """product(x, panels, bias, out, rows, outputs, threads) for rows of that many steps: addresses, and numbers."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol("GOMP_parallel", parallel())
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="pic", jit=True
    )
    module = llvm.parse_assembly("\n".join(_source(steps, dtype)))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    product: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(engine.get_function_address("product"))
    product.engine = engine  # the code lives as long as its engine
    return product


def _source(steps: int, dtype: torch.dtype) -> Iterator[str]:
    yield panel_source.PREAMBLE + _PREAMBLE
    for rows in range(1, ROWS + 1):
        yield from _tile(rows, steps, dtype)
    tiles = ", ".join(f"ptr @tile{rows}" for rows in range(1, ROWS + 1))
    yield f"@tiles = internal constant [{ROWS} x ptr] [{tiles}]"
    yield Template(panel_source.PRODUCT + _PRODUCT).substitute(
        ROWS=ROWS,
        UP=ROWS - 1,
        COLUMNS=COLUMNS,
        OVER=COLUMNS - 1,
        ITEMSIZE=dtype.itemsize,
        UNIT=4 * COLUMNS,
        ROW_UNIT=4,
        STEPS=steps,
        AHEAD=AHEAD,
        RUN=panel_source.ON_ALL_THREADS,
    )


def _tile(rows: int, steps: int, dtype: torch.dtype) -> Iterator[str]:
    """Rows x[0..rows) times one panel: sums in registers, from a bias to a rounded store of at most `columns`."""
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
    for half in (0, 1):
        yield f"  %left{half} = sub i64 %columns, {16 * half}"
        yield f"  %l{half} = insertelement <16 x i64> poison, i64 %left{half}, i64 0"
        yield f"  %ls{half} = shufflevector <16 x i64> %l{half}, <16 x i64> poison, <16 x i32> zeroinitializer"
        yield f"  %mask{half} = icmp slt <16 x i64> <{', '.join(f'i64 {i}' for i in range(16))}>, %ls{half}"
    for row, half in sums:
        at = f"{row}.{half}"
        yield f"  %o{at} = mul i64 %stride, {row}"
        yield f"  %r{at} = getelementptr i8, ptr %y, i64 %o{at}"
        yield f"  %y{at} = getelementptr i8, ptr %r{at}, i64 {16 * dtype.itemsize * half}"
        yield from _store(at, half, dtype)
    yield "  ret void"
    yield "}"


def _store(at: str, half: int, dtype: torch.dtype) -> Iterator[str]:
    """Sums, rounded to the dtype, to their place."""
    kind, sums = ("v16f32", "<16 x float>"), f"%s{at}.{STEPS}"
    if dtype == torch.bfloat16:
        yield f"  %n{at} = fptrunc <16 x float> {sums} to <16 x bfloat>"
        yield f"  %h{at} = bitcast <16 x bfloat> %n{at} to <16 x i16>"
        kind, sums = ("v16i16", "<16 x i16>"), f"%h{at}"
    mask = f"i32 {dtype.itemsize}, <16 x i1> %mask{half}"
    yield f"  call void @llvm.masked.store.{kind[0]}.p0({kind[1]} {sums}, ptr %y{at}, {mask})"


def _step(step: int, rows: int, steps: int, dtype: torch.dtype) -> Iterator[str]:
    """Four bytes of every row, one or two inputs, times their 32 weights or pairs of weights."""
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


_PREAMBLE = """
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
