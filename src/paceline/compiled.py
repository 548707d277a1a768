"""For compiled loops: numbers at an address, and bfloat16, which NumPy lacks; and a word while they are compiled."""

import logging
from time import monotonic
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils, event
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import overload

intrinsic: Any = numba_intrinsic  # its type demands the typing context, which callers do not pass
log = logging.getLogger("paceline.compiling")


class Compiling(event.Listener):
    """Says in the log that functions are compiled: what is compiled is kept, so only their first use takes so long.

    Of numba's own functions it hears by an event; for others it is a context."""

    EVERY = 10.0  # seconds of compiling between two lines

    def __init__(self) -> None:
        self._depth, self._seconds, self._said = 0, 0.0, -self.EVERY

    def __enter__(self) -> None:
        if not self._depth:
            self._began = monotonic()
            if self._seconds - self._said >= self.EVERY:
                so_far = f"{self._seconds:.0f} s so far" if self._seconds else "up to half a minute"
                log.info("compiling for this processor what has not run here yet; it is kept; %s", so_far)
                self._said = self._seconds
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._seconds += monotonic() - self._began

    def on_start(self, _: Any) -> None:
        self.__enter__()

    def on_end(self, _: Any) -> None:
        self.__exit__()


compiling = Compiling()
event.register("numba:run_pass", compiling)


@intrinsic
def address(typingctx: Any, where: Any) -> Any:
    """An address, int64, as Numba's pointer type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits, uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic
def bits_of(typingctx: Any, number: Any) -> Any:
    """The bits, uint32, of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def take(typingctx: Any, counter: Any, count: Any) -> Any:
    """counter[0], and add `count` to it, atomically; int64. What was written before an earlier take can be read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, arguments[1], "acq_rel")

    return types.int64(counter, types.int64), generate


@intrinsic
def look(typingctx: Any, counter: Any) -> Any:
    """counter[0], int64. What was written before the `take` or `swap` that made it so can be read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(data, "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def swap(typingctx: Any, counter: Any, old: Any, new: Any) -> Any:
    """Make counter[0] `new` if it is `old`, atomically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.cmpxchg(data, arguments[1], arguments[2], "acq_rel", "acquire")
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64), generate


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call the function without result at an address. arguments: a tuple of int64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [word.type for word in words])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), words)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@njit(inline="always")
def wide(half: Any) -> Any:
    """bfloat16 bits to float32."""
    return float_of(np.uint32(half) << np.uint32(16))


@njit(inline="always")
def narrow(number: Any) -> Any:
    """float32 to bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = bits_of(np.float32(number))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@njit(inline="always")
def exponential(x: Any) -> Any:
    """e**x in float32, relative error below 1e-6: 2**k times a polynomial, without calls, so that loops vectorise."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    k = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.3981999507e-3) + r * np.float32(1.9875691500e-4)
    p = np.float32(8.3334519073e-3) + r * p
    p = np.float32(4.1665795894e-2) + r * p
    p = np.float32(1.6666665459e-1) + r * p
    p = np.float32(5.0000001201e-1) + r * p
    p = np.float32(1.0) + r + r * r * p
    return p * float_of(np.uint32((np.int32(k) + np.int32(127)) << np.int32(23)))


@njit(inline="always")
def halves(where: Any, size: Any) -> Any:
    """`size` bfloat16 numbers at an address, as their bits, uint16."""
    return carray(address(where), (size,), np.uint16)


def widened(number):  # type: ignore[no-untyped-def]
    """float32 of bfloat16 bits (uint16) or of a float32, in compiled functions."""
    raise NotImplementedError("compiled code only")


@overload(widened)
def _widened(number):  # type: ignore[no-untyped-def]
    return (lambda number: number) if number == types.float32 else (lambda number: wide(number))


def put(out, at, number):  # type: ignore[no-untyped-def]
    """out[at] = number, rounded if `out` holds bfloat16 bits (uint16), in compiled functions."""
    raise NotImplementedError("compiled code only")


@overload(put)
def _put(out, at, number):  # type: ignore[no-untyped-def]
    def as_it_is(out, at, number):  # type: ignore[no-untyped-def]
        out[at] = number

    def rounded(out, at, number):  # type: ignore[no-untyped-def]
        out[at] = narrow(number)

    return as_it_is if out.dtype == types.float32 else rounded
