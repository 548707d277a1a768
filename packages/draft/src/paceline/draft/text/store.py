"""A store: a folder of arrays that a drafter reads, built once and mapped into memory, which processes share.

`store.json` names the kind of the store and the tokenizer of its token ids; each array is one .npy file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import StoreError
from paceline.jsonl import loads

if TYPE_CHECKING:
    from paceline.formats.facts import Facts

HEADER = "store.json"
VERSION = 1

Progress = Callable[[float], None]
"""Called with the share that is done, 0 to 1."""


def silent(done: float) -> None:
    """Report progress to nobody."""


@dataclass
class StoreWriter:
    """A store that is being written.

    facts   further entries of the header.
    arrays  size in bytes of each array that has been written."""

    folder: Path
    facts: dict[str, Any]
    arrays: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, array: NDArray[Any]) -> None:
        np.save(self.folder / f"{name}.npy", array, allow_pickle=False)
        self.arrays[name] = (self.folder / f"{name}.npy").stat().st_size


@contextmanager
def writing(out: str | Path, *, kind: str, tokenizer: str, **facts: Any) -> Iterator[StoreWriter]:
    """Write a store. When the block ends, it appears at `out` whole or not at all.

    tokenizer  `Tokenizer.fingerprint` of the token ids' tokenizer."""
    out = Path(out)
    held = [out] if out.is_file() else [*out.iterdir()] if out.exists() else []
    if held and not ((out / HEADER).exists() and all(f.name == HEADER or f.suffix == ".npy" for f in held)):
        raise StoreError(f"{out} exists and is not a store alone; choose another place, nothing was written")
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        writer = StoreWriter(part, facts)
        yield writer
        header = {"version": VERSION, "kind": kind, "tokenizer": tokenizer, **writer.facts, "arrays": writer.arrays}
        (part / HEADER).write_text(json.dumps(header, indent=2) + "\n", "utf-8")
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    except OSError as error:  # NumPy's errors have a text, but no errno.
        raise StoreError(f"{out} cannot be written: {error.strerror or error}; nothing of it is left") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class Store:
    """An opened store with the content of its store.json."""

    folder: Path
    header: dict[str, Any]

    def array(self, name: str) -> NDArray[Any]:
        """Map an array, read-only."""
        if name not in self.header["arrays"]:
            has = ", ".join(self.header["arrays"]) or "nothing"
            raise StoreError(f"the store {self.folder} has no {name} (it has {has}); build it again with that part")
        try:
            mapped: NDArray[Any] = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise StoreError(f"the store {self.folder} is broken: {name}.npy cannot be read ({error})") from None
        return mapped


def open_for(target: Facts, folder: str | Path) -> Store:
    """Open the corpus in `folder`. StoreError if the target has another tokenizer."""
    return open_store(folder, kind="corpus", tokenizer=target.tokenizer.fingerprint if target.tokenizer else None)


def open_store(folder: str | Path, *, kind: str, tokenizer: str | None = None) -> Store:
    """Open the store in `folder`. StoreError if it is missing, truncated, of another kind or of another tokenizer.

    tokenizer  fingerprint of the tokenizer that the store must have; None: any."""
    folder = Path(folder)
    file = folder / HEADER
    if not file.exists():
        made = ": build one with `paceline corpus build`" if kind == "corpus" else ""
        raise StoreError(f"there is no store {folder}{made}")
    try:
        header = loads(file.read_bytes())
        version, stored, of = header["version"], header["kind"], header["tokenizer"]
        sizes: dict[str, int] = dict(header["arrays"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} cannot be read ({error}); build the store again") from None
    if version != VERSION:
        raise StoreError(f"the store {folder} has format {version}, this version reads {VERSION}; build it again")
    if stored != kind:
        raise StoreError(f"the store {folder} is a {stored}, not a {kind}")
    if tokenizer is not None and of != tokenizer:
        other = f"another tokenizer ({header.get('tokenizer_name', of)}): its token ids mean other text here"
        raise StoreError(f"the store {folder} was built with {other}; build it again with this model's tokenizer")
    for name, size in sizes.items():
        array = folder / f"{name}.npy"
        held = array.stat().st_size if array.exists() else 0
        if held != size:
            raise StoreError(f"the store {folder} is truncated: {name}.npy has {held:,} of {size:,} bytes")
    return Store(folder, header)
