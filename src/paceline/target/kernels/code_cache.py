"""A cache of compiled kernels on disk: to write and compile a kernel takes a second, to read it some milliseconds."""

import hashlib
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import llvmlite

from paceline.compiled import compiling
from paceline.folders import cache_folder

UNUSED_DAYS = 30


def load_or_compile(key: str, compile: Callable[[], bytes]) -> bytes:
    """The machine code that `compile` makes, or made earlier for this key and these sources.

    A file begins with the digest of its code; a file that was cut short or changed is made anew. Nothing is kept in a
    folder that cannot be written, or where others could write code for this user to run."""
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
    """Whether this user alone may write to `path`. A link is not trusted: its owner could redirect it."""
    about = path.lstat()
    if not hasattr(os, "getuid"):
        return False  # Windows has other access rights, which are not read here
    return not stat.S_ISLNK(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


@cache
def _sources() -> str:
    """A digest of all code that writes kernels: the modules of the package `target`, and LLVM's version."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join([llvmlite.__version__.encode(), *(file.read_bytes() for file in files)])).hexdigest()
