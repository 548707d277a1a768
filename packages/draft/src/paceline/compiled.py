"""For compiled loops: numbers at an address, and bfloat16, which NumPy lacks; and a word while they are compiled."""

import logging
import math
from importlib.util import find_spec
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
    """Warns in the log, which Python prints, that functions are compiled. They are kept, so only the first use takes
    so long.

    Of numba's own functions it hears by an event; for others it is a context."""

    EVERY = 10.0  # Seconds of compiling between two lines.

    def __init__(self) -> None:
        self._depth, self._seconds, self._said = 0, 0.0, -self.EVERY

    def __enter__(self) -> None:
        if not self._depth:
            self._began = monotonic()
            if self._seconds - self._said >= self.EVERY:
                has_engine = find_spec("paceline.kernels") is not None  # Which brings that command.
                ahead = "usually 10 to 60 s" + " (`paceline doctor --compile` does it for all commands)" * has_engine
                so_far = f"{self._seconds:.0f} s so far" if self._seconds else ahead
                log.warning("compiling kernels that run here for the first time; they are kept; %s", so_far)
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


def _bits(taken: Any, given: Any) -> Any:
    """A function from one type to another of the same size: the bits stay."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(given))

    return intrinsic(lambda typingctx, number: (given(taken), generate))


float_of, bits_of = _bits(types.uint32, types.float32), _bits(types.float32, types.uint32)
"""The float32 with these bits, uint32, and the bits of a float32."""
double_of, bits_of_double = _bits(types.uint64, types.float64), _bits(types.float64, types.uint64)
"""The same of float64 and uint64."""


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of three float32 or three float64, rounded once. Left to the compiler, that depends on the processor
    and on the loop around."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return (a(a, a, a) if a == b == c else None), generate


@intrinsic
def fetch_add(typingctx: Any, counter: Any, count: Any) -> Any:
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


LOWEST_EXPONENT = np.float32(-87.0)
"""Below this, e**x counts as 0 in float32: e**-87 is near the smallest normal number."""
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
"""1 / ln 2, and ln 2 in two parts; a small whole number times the first part is exact."""
E5, E4, E3, E2, E1, E0 = (
    np.float32(term)
    for term in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
"""e**r = 1 + r + r**2 (E0 + E1 r + ... + E5 r**5) for |r| up to ln 2 / 2, relative error below 1e-7."""


@njit(inline="always")
def exponential(x: Any) -> Any:
    """e**x in float32, relative error below 1e-6: 2**k times a polynomial, without calls, so that loops vectorise."""
    x = min(max(x, LOWEST_EXPONENT), np.float32(88.0))
    k = np.floor(fma(x, LOG2_E, np.float32(0.5)))
    r = fma(k, -LN2_LOW, fma(k, -LN2_HIGH, x))
    p = fma(fma(fma(fma(fma(r, E5, E4), r, E3), r, E2), r, E1), r, E0)
    p = fma(p * r, r, r + np.float32(1.0))
    return p * float_of(np.uint32((np.int32(k) + np.int32(127)) << np.int32(23)))


# A C library's functions have other last bits on another processor, so these are our own, in float64.

_LN2 = 0.6931471803691238, 1.9082149292705877e-10  # the first has 32 bits, so its product with an exponent is exact


@njit(inline="always")
def power(x: Any) -> Any:
    """e**x in float64, relative error below 1e-15; 0 below -700, infinity above 700, NaN for NaN."""
    near = fma(min(max(x, -701.0), 701.0), 1.4426950408889634, 6755399441055744.0)  # the exponent is in its last bits
    k = near - 6755399441055744.0
    r = fma(k, -_LN2[1], fma(k, -_LN2[0], min(max(x, -701.0), 701.0)))
    p = fma(r, 1 / 6227020800, 1 / 479001600)
    p = fma(p, r, 1 / 39916800)
    p = fma(p, r, 1 / 3628800)
    p = fma(p, r, 1 / 362880)
    p = fma(p, r, 1 / 40320)
    p = fma(p, r, 1 / 5040)
    p = fma(p, r, 1 / 720)
    p = fma(p, r, 1 / 120)
    p = fma(p, r, 1 / 24)
    p = fma(p, r, 1 / 6)
    p = fma(p, r, 0.5)
    p = fma(p, r, 1.0)
    p = fma(p, r, 1.0) * double_of((bits_of_double(near) + np.uint64(1023)) << np.uint64(52))
    return x if x != x else 0.0 if x < -700 else math.inf if x > 700 else p


@njit
def logarithm(x: Any) -> Any:
    """ln x of a normal float64 above 0, absolute error below 1e-15 and a last bit."""
    bits = bits_of_double(x)
    k = np.float64(np.int64(bits >> np.uint64(52)) - 1023)
    m = double_of((bits & np.uint64(0xFFFFFFFFFFFFF)) | np.uint64(1023 << 52))
    if m > 1.4142135623730951:
        m, k = 0.5 * m, k + 1
    s = (m - 1) / (m + 1)  # ln m = 2 (s + s**3 / 3 + s**5 / 5 ...)
    p = 0.0
    for n in range(21, 1, -2):
        p = fma(p, s * s, 1 / n)
    return fma(k, _LN2[0], fma(k, _LN2[1], 2 * fma(p * s * s, s, s)))


@njit(inline="always")
def _cosine_and_sine(x: Any) -> Any:
    """cos x and sin x of a float64, absolute error below 1e-15 for x up to a million."""
    k = np.floor(fma(x, 0.6366197723675814, 0.5))
    r = fma(k, -6.077100506506192e-11, fma(k, -1.5707963267341256, x))
    square, cosine, sine = r * r, 1.0, 1.0
    for n in range(18, 0, -2):
        cosine = 1 - cosine * square * (1 / (n * (n - 1)))
        sine = 1 - sine * square * (1 / (n * (n + 1)))
    sine *= r
    quarter = np.int32(k) & np.int32(3)
    turned, other = (sine, cosine) if quarter & 1 else (cosine, sine)
    return (-turned if quarter == 1 or quarter == 2 else turned), (-other if quarter & 2 else other)


@njit(cache=True)
def cosines_and_sines(angles: Any) -> Any:
    """cos and sin of angles [n, m] up to a million, float32."""
    cos, sin = np.empty_like(angles), np.empty_like(angles)
    for i in range(len(angles)):
        for j in range(angles.shape[1]):
            c, s = _cosine_and_sine(np.float64(angles[i, j]))
            cos[i, j], sin[i, j] = c, s
    return cos, sin


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
