"""Kernels written with Python's operators on vectors. LLVM compiles them when they are first used.

    def double(x: v.Value, y: v.Value) -> None:
        v.store(y, v.load(x, v.F32) * 2.0)

    address = v.compiled("doubling", lambda module: module.add("double", double))
    address("double")                               # address of a function that doubles 16 numbers

A function such as `double` runs once, to write the code: its arguments are `Value`s, and each operation adds an
instruction. Python's loops are unrolled; `loop` makes a compiled loop. Arguments of compiled functions are integers of
64 bits, such as addresses. Why not C: docs/quantised.md, "How the kernels are written"."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from inspect import signature
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from paceline import processor
from paceline.compiled import compiling
from paceline.compiled import intrinsic as numba_intrinsic
from paceline.folders import cache_folder

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, VOID = ir.HalfType(), ir.FloatType(), ir.VoidType()
LANES = 16
"""Number of 32-bit lanes of a vector: a register of AVX-512, or two registers of AVX2."""
_now: Any = threading.local()  # `builder` writes this thread's current function.


@contextmanager
def writing(builder: ir.IRBuilder) -> Iterator[None]:
    """A context in which operations add instructions to the function of `builder`, which may be Numba's."""
    before, _now.builder = getattr(_now, "builder", None), builder
    try:
        yield
    finally:
        _now.builder = before


def _operator(name: str) -> Callable[[Value, Value | float], Value]:
    def operate(a: Value, b: Value | float) -> Value:
        kind = f"f{name}" if a.kind in (F16, F32) else name
        return Value(getattr(_now.builder, kind)(a.ir, a.like(b).ir))

    return operate


def _comparison(sign: str) -> Callable[[Value, Value | float], Value]:
    def compare(a: Value, b: Value | float) -> Value:
        builder = _now.builder
        compare = builder.fcmp_ordered if a.kind in (F16, F32) else builder.icmp_unsigned
        return Value(compare(sign, a.ir, a.like(b).ir))

    return compare


class Value:
    """A number or a vector in the function that is being written. A Python number as an operand fills all lanes.

    <, >, // and % treat integers as unsigned; >> shifts in zeros."""

    __add__, __sub__, __mul__ = map(_operator, ("add", "sub", "mul"))
    __truediv__, __floordiv__, __mod__ = map(_operator, ("div", "udiv", "urem"))
    __and__, __or__, __xor__, __lshift__, __rshift__ = map(_operator, ("and_", "or_", "xor", "shl", "lshr"))
    __lt__, __gt__ = map(_comparison, "<>")

    def __init__(self, value: Any):
        self.ir = value
        self.lanes = value.type.count if isinstance(value.type, ir.VectorType) else 1
        self.kind = value.type.element if self.lanes > 1 else value.type

    def __neg__(self) -> Value:
        return Value(_now.builder.fneg(self.ir))

    def like(self, other: Value | float) -> Value:
        """Convert a Python number to a Value of this type, in all lanes. Values are returned as they are."""
        return other if isinstance(other, Value) else literal(self.kind, *[other] * self.lanes)

    def below(self, other: Value) -> Value:
        """Signed <."""
        return Value(_now.builder.icmp_signed("<", self.ir, other.ir))

    def is_nan(self) -> Value:
        """Test each lane for NaN."""
        return Value(_now.builder.fcmp_unordered("uno", self.ir, self.ir))

    def shifted(self, bits: int) -> Value:
        """Shift right and keep the sign."""
        return Value(_now.builder.ashr(self.ir, self.like(bits).ir))

    def cast(self, how: str, kind: ir.Type) -> Value:
        """Convert all lanes by an instruction of LLVM: zext, sext, trunc, sitofp, uitofp, fptosi, fpext."""
        return Value(getattr(_now.builder, how)(self.ir, vector(kind, self.lanes)))

    def view(self, kind: ir.Type, lanes: int | None = None) -> Value:
        """The same bits, as lanes of another type."""
        return Value(_now.builder.bitcast(self.ir, vector(kind, lanes or self.lanes)))

    def part(self, first: int, count: int) -> Value:
        """Lanes first to first + count - 1."""
        return shuffled(self, self, range(first, first + count))

    def lane(self, number: int) -> Value:
        """The lane with this number."""
        return Value(_now.builder.extract_element(self.ir, ir.Constant(I32, number)))


def vector(kind: ir.Type, lanes: int = LANES) -> ir.Type:
    """The type of a vector; of a number if there is a single lane."""
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


@cache
def literal(kind: ir.Type, *lanes: float) -> Value:
    """A constant vector; with a single lane, a number."""
    return Value(ir.Constant(vector(kind, len(lanes)), lanes[0] if len(lanes) == 1 else list(lanes)))


def splat(number: Value, lanes: int = LANES) -> Value:
    """A vector of `number` in all lanes."""
    anything = ir.Constant(vector(number.kind, lanes), ir.Undefined)
    first = Value(_now.builder.insert_element(anything, number.ir, ir.Constant(I64, 0)))
    return shuffled(first, first, [0] * lanes)


def join(low: Value, high: Value) -> Value:
    """The lanes of `low`, then those of `high`."""
    return shuffled(low, high, range(low.lanes + high.lanes))


def shuffled(low: Value, high: Value, lanes: Sequence[int]) -> Value:
    """The lanes with these numbers, which count the lanes of `low`, then those of `high`."""
    return Value(_now.builder.shuffle_vector(low.ir, high.ir, literal(I32, *lanes).ir))


def select(condition: Value, true: Value, false: Value) -> Value:
    """Choose `true` or `false` in each lane."""
    return Value(_now.builder.select(condition.ir, true.ir, false.ir))


def fma(a: Value, b: Value | float, c: Value | float) -> Value:
    """a * b + c, rounded once; float32."""
    return intrinsic(f"llvm.fma.v{a.lanes}f32", a.ir.type, a, a.like(b), a.like(c))


def intrinsic(name: str, kind: ir.Type, *arguments: Value) -> Value:
    """Call an intrinsic function of LLVM, whose result has the type `kind`."""
    values = [argument.ir for argument in arguments]
    function = ir.FunctionType(kind, [value.type for value in values])
    return Value(_now.builder.call(_now.builder.module.declare_intrinsic(name, (), function), values))


def pointer(at: Value) -> Value:
    """Convert an address to the pointer that intrinsics take."""
    return Value(_now.builder.inttoptr(at.ir, ir.PointerType()))


def load(at: Value, kind: ir.Type, lanes: int = LANES, align: int = 4) -> Value:
    """Load a number or a vector from an address that is a multiple of `align`."""
    return Value(_now.builder.load(pointer(at).ir, typ=vector(kind, lanes), align=align))


def load_wide(at: Value, is_half: bool) -> Value:
    """Load 16 numbers as float32; is_half: they are bfloat16."""
    return (load(at, I16, align=2).cast("zext", I32) << 16).view(F32) if is_half else load(at, F32)


def store(at: Value, value: Value, align: int = 4, mask: Value | None = None) -> None:
    """Write a value to an address. mask: write only these lanes."""
    if mask is None:
        _now.builder.store(value.ir, pointer(at).ir, align=align)
    else:
        name = f"llvm.masked.store.v{value.lanes}{value.kind.intrinsic_name}.p0"
        intrinsic(name, VOID, value, pointer(at), literal(I32, align), mask)


def prefetch(at: Value, nbytes: int) -> None:
    """Prefetch `nbytes` bytes into the L2 cache."""
    for line in range(0, nbytes, 64):
        intrinsic("llvm.prefetch.p0", VOID, pointer(at + line), *(literal(I32, hint) for hint in (0, 2, 1)))


def reserve(nbytes: int) -> Value:
    """Reserve memory on the function's stack. Returns its address, a multiple of 64."""
    with _now.builder.goto_entry_block():
        place = _now.builder.alloca(ir.ArrayType(I8, nbytes))
        place.align = 64
        return Value(_now.builder.ptrtoint(place, I64))


def loop(count: Value, begin: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]) -> list[Value]:
    """Compute values = body(i, values) for i from 0 to count - 1, at least once, starting with `begin`. Returns the
    last values."""
    builder, before = _now.builder, _now.builder.block
    inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(inside)
    builder.position_at_end(inside)
    first = [literal(I64, 0), *begin]
    values = [Value(builder.phi(value.ir.type)) for value in first]
    done = list(body(values[0], values[1:]))
    following = [values[0] + 1, *done]
    for value, early, late in zip(values, first, following, strict=True):
        value.ir.add_incoming(early.ir, before)
        value.ir.add_incoming(late.ir, builder.block)
    builder.cbranch((following[0] < count).ir, inside, after)
    builder.position_at_end(after)
    return done


def folded(x: Value, join: Callable[[Value, Value], Value]) -> Value:
    """Reduce 16 lanes to a number in a fixed order, one half with the other."""
    for width in (8, 4, 2, 1):
        x = join(x, shuffled(x, x, [(lane + width) % LANES for lane in range(LANES)]))
    return x.lane(0)


def step(returns: Any) -> Callable[[Callable[..., Value | None]], Any]:
    """Decorate a function that is written with this module, so that Numba's compiled code can call it.

    Its first parameter is the dtype of the first array among the arguments. Arrays are passed as addresses.

    returns  the type of its result."""

    def decorate(body: Callable[..., Value | None]) -> Any:
        """Make an intrinsic of a function that writes instructions."""
        def typed(_: Any, *kinds: Any) -> Any:
            """Return the signature for arguments of these kinds, and the writer of the body."""
            dtype = next(kind.dtype for kind in kinds if isinstance(kind, types.Array))

            def write(context: Any, builder: Any, called: Any, arguments: Any) -> Any:
                def word(kind: Any, argument: Any) -> Value:
                    if not isinstance(kind, types.Array):
                        return Value(argument)
                    return Value(builder.ptrtoint(context.make_array(kind)(context, builder, argument).data, I64))

                with writing(builder):
                    result = body(dtype, *map(word, called.args, arguments))
                return context.get_dummy_value() if result is None else result.ir

            return returns(*(types.int64 if isinstance(kind, types.Integer) else kind for kind in kinds)), write

        typed.__signature__ = signature(body)  # type: ignore[attr-defined]
        return numba_intrinsic(typed)

    return decorate


class Module:
    """Functions that are compiled together."""

    def __init__(self) -> None:
        self.ir = ir.Module()

    def add(self, name: str, body: Callable[..., None]) -> None:
        """Add a function without result. Its arguments are integers, one for each parameter of `body`."""
        arguments = [I64] * len(signature(body).parameters)
        function = ir.Function(self.ir, ir.FunctionType(VOID, arguments), name)
        _now.builder = ir.IRBuilder(function.append_basic_block("entry"))
        body(*map(Value, function.args))
        _now.builder.ret_void()


def compiled(name: str, write: Callable[[Module], None], without: tuple[str, ...] = ()) -> Callable[[str], int]:
    """Compile, for this CPU, the functions that `write` adds to a module. Returns a function that gives their addresses
    by name; the code lives as long as this function.

    name     name of the module, under which the code is cached. Different code needs different names.
    without  prefixes of CPU features that are switched off, though this CPU may have them."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = processor.features()
    for feature in features:
        features[feature] = features[feature] and not feature.startswith(without)
    cpu, flags = processor.name(), features.flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=flags, opt=3, reloc="pic", jit=True
    )

    def compile() -> bytes:
        module = Module()
        write(module)
        parsed = llvm.parse_assembly(str(module.ir))
        parsed.verify()
        code: bytes = machine.emit_object(parsed)
        return code

    code = load_or_compile(f"{name} {cpu} {flags}", compile)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return cache(engine.get_function_address)


# A cache on disk: to write and compile a kernel takes a second, to read it some milliseconds --------------------------

UNUSED_DAYS = 30


def load_or_compile(key: str, compile: Callable[[], bytes]) -> bytes:
    """The machine code that `compile` makes, or has made earlier for this key and these sources.

    A file begins with a digest of its code; a damaged file is made anew. Nothing is kept in a folder that cannot be
    written, or in which others could write code for this user to run."""
    path = cache_folder() / "kernels" / f"{hashlib.sha256(f'{_sources()} {key}'.encode()).hexdigest()}.o"
    with suppress(OSError):
        if _is_ours(path.parent) and _is_ours(path):
            content = path.read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                os.utime(path)
                return content[32:]
    with compiling:
        code = compile()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(path.parent):
            for file in path.parent.iterdir():
                if file.stat().st_mtime < time.time() - UNUSED_DAYS * 86_400:
                    file.unlink()
            with NamedTemporaryFile(dir=path.parent, delete=False) as part:
                part.write(hashlib.sha256(code).digest() + code)
            os.replace(part.name, path)
    return code


def _is_ours(path: Path) -> bool:
    """Whether only this user may write to `path`. A link is not trusted, because its owner could redirect it."""
    about = path.lstat()
    if not hasattr(os, "getuid"):
        return False  # Windows has other access rights, which are not read here.
    return not stat.S_ISLNK(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


@cache
def _sources() -> str:
    """A digest of all code that writes kernels: the modules of this package, and LLVM's version."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join([llvmlite.__version__.encode(), *(file.read_bytes() for file in files)])).hexdigest()
