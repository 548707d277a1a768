"""The features of this processor. Every choice of a kernel asks here, and here alone.

    PACELINE_CPU=avx2 paceline generate ...      # as on a processor with AVX2 alone

The variable tells less than there is: to see what another machine would do, and to test it. `import paceline` hands it
on to torch, oneDNN, MKL and numba, where these have not been imported yet; on Arm it is for our kernels alone. It
changes speed, and the last bits of logits, but not with `--exact` in float32."""

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from paceline.errors import PacelineError, meant

VARIABLE = "PACELINE_CPU"
ARM = platform.machine().lower() in ("aarch64", "arm64")
_X86_LEVELS = {
    "library": ("avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "avx-vnni": ("avx2", "fma", "f16c", "avxvnni"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "amx": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "amx-bf16"),
}
_ARM_LEVELS = {"neon": ("neon",), "dotprod": ("neon", "dotprod")}
LEVELS: dict[str, tuple[str, ...]] = _ARM_LEVELS if ARM else _X86_LEVELS
"""Levels of this kind of processor, from the least, and features that a processor of it has. "library" has all that
there is but AMX, and leaves to torch's library the products that AMX leaves to it: so what only a processor with AMX
does in float32 is tested on others."""
_WIDE = ("avx512", "avx10", "evex512", "amx")
_BEYOND: dict[str, tuple[str, ...]] = {
    "library": ("amx",), "avx2": (*_WIDE, "avxvnni", "avxifma", "avxneconvert"), "avx-vnni": _WIDE,
    "avx512": ("amx",), "amx": (), "neon": ("dotprod",), "dotprod": (),
}  # fmt: skip
"""Beginnings of names of features that a level does not have."""
_FOLLOWERS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
             "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"},
    "avx-vnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
                 "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"},
    **{name: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"} for name in ("library", "avx512")},
    "amx": {},
}  # fmt: skip
"""Variables by which other libraries learn of a level, before they are imported."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_forced: str | None = None


def pass_on() -> None:
    """Hand PACELINE_CPU on to libraries that are imported later."""
    for variable, value in _FOLLOWERS.get(os.environ.get(VARIABLE, ""), {}).items():
        os.environ.setdefault(variable, value)


@contextmanager
def forced(level: str) -> Iterator[None]:
    """A context in which our kernels are those of a level, for tests. Other libraries do not follow."""
    global _forced
    before, _forced = _forced, level
    try:
        yield
    finally:
        _forced = before


def _asked() -> str | None:
    """The level that PACELINE_CPU asks for; None: the processor's own."""
    level = _forced or os.environ.get(VARIABLE) or None
    if level is not None and level not in LEVELS:
        raise PacelineError(f"{VARIABLE} is {level!r}; there are {', '.join(LEVELS)}.{meant(level, LEVELS)}")
    return level


@cache
def _host() -> Any:
    import llvmlite.binding as llvm  # Imported late, so that help need not wait for it.

    found = llvm.get_host_cpu_features()
    found.update(_arm_features() if ARM else {})
    return found


def _arm_features() -> dict[str, bool]:
    """Those that LLVM does not find by itself. Linux has a bit of dot products, macOS a name."""
    there = ctypes.c_int(0)
    if sys.platform == "linux":
        of_kernel = ctypes.CDLL(None).getauxval
        of_kernel.argtypes, of_kernel.restype = [ctypes.c_ulong], ctypes.c_ulong
        there.value = of_kernel(16) >> 20 & 1  # AT_HWCAP, HWCAP_ASIMDDP
    elif sys.platform == "darwin":
        size, nothing = ctypes.c_size_t(4), ctypes.c_size_t(0)
        name = b"hw.optional.arm.FEAT_DotProd"
        ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(there), ctypes.byref(size), None, nothing)
    return {"neon": True, "dotprod": bool(there.value)}


def features() -> Any:
    """LLVM's map of the features, by name, without those beyond the level that is asked for."""
    found, beyond = _host().__class__(_host()), _BEYOND[_asked() or [*LEVELS][-1]]
    for name in found:
        found[name] = found[name] and not name.startswith(beyond)
    return found


def remembered(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Like functools.cache, for results that depend on the level too."""

    @cache
    def of_level(level: str | None, *arguments: Any) -> Result:
        return function(*arguments)  # type: ignore[call-arg]

    @wraps(function)
    def call(*arguments: Any) -> Result:
        return of_level(_asked(), *arguments)

    return call  # type: ignore[return-value]


@remembered
def _features() -> frozenset[str]:
    return frozenset(name for name, there in features().items() if there)


def has(*names: str) -> bool:
    """Whether the processor has all these features, by LLVM's names, at the level that is asked for."""
    return _features() >= {*names}


def allows(name: str) -> bool:
    """Whether a feature is not beyond the level that is asked for: other libraries may use it if it is there."""
    level = _asked()
    return level is None or not name.startswith(_BEYOND[level])


def prefers_library() -> bool:
    """Whether torch's library makes those products whose sums need no fixed order."""
    return ARM or has("amx-bf16") or _asked() == "library"


def levels() -> list[str]:
    """The levels that this processor has, from the least."""
    return [name for name, needs in LEVELS.items() if all(_host().get(need) for need in needs)]


def level() -> str:
    """The level that is used: the highest, or the one asked for if there is more. "plain" on other processors."""
    asked, there = _asked(), levels()
    if not there:
        return "plain"
    return asked if asked in there else there[-1]


def name() -> str:
    """LLVM's name of the processor."""
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name())
