"""Compile ahead what commands compile when they first need it, for `paceline doctor --compile`.

Each part is kept when it is done, so a run that is stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.compiled import cosines_and_sines
from paceline.core.noise import Noise
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.draft.text import ngrams, suffix_array
from paceline.draft.text.store import writing
from paceline.kernels import rows
from paceline.kernels.blocks import KINDS, Kind
from paceline.kernels.linear import has_units
from paceline.replay.walk import tokens_only

Part = tuple[str, Callable[[], object]]

KERNELS = ("attention", "delta", "packing", "program", "steps", "tiles")
"""Modules whose import compiles them."""
READERS = {
    np.uint16: ("rest:{}", "suffix,corpus={}", "hierarchy,corpus={}", "sam,corpus={}"),
    np.int32: ("rest:{}", "hierarchy,corpus={}", "sam,corpus={}"),
}
"""Drafters that read a corpus, by its type of tokens."""
TEXT = "abcde.abxyz."
VOCABULARY = 320


def parts() -> list[Part]:
    """What this processor needs for models of any kind and drafters without a checkpoint, with names. Products of
    weights that are not in blocks are missing: their code depends on a matrix's width."""
    return [
        *((f"kernels: {name}", partial(import_module, f"paceline.kernels.{name}")) for name in KERNELS),
        ("rotation", lambda: cosines_and_sines(np.zeros((1, 1), np.float32))),
        ("sampling", _sampling),
        *((f"products of {kind.name}", partial(_products, kind)) for kind in KINDS.values()),
        ("products by AMX", _by_amx),
        ("drafters", lambda: tokens_only(Recording(None, (2,), VOCABULARY))),
        *((f"drafters of a corpus in {dtype.__name__}", partial(_readers, dtype, specs))
          for dtype, specs in READERS.items()),
    ]  # fmt: skip


def _sampling() -> None:
    """What reads a row of logits, and draws from it."""
    for dtype in (torch.float32, torch.float64):
        logits = torch.zeros(1, 4, dtype=dtype)
        for read in (rows.best_token, rows.certainty_of_row):
            read(logits, 0)
        rows.top_tokens(logits, 2)
        rows.log_total(logits)
    probs = rows.softmax(torch.zeros(1, 4))[0]
    rows.keep_best(probs, 2, 0.9, 0.1)
    noise = Noise(0)
    noise.choose(probs, 0)
    noise.happens(0.5, 0)


def _products(kind: Kind) -> None:
    """Products with blocks of a kind, in the dtypes that this processor has. Inputs of 16 bits are for float32
    (`formats/precision.py`)."""
    from paceline.kernels import amx, integer  # imported here, because the import compiles

    few, many = torch.bfloat16, torch.float32
    for dtype, out, size in ((many, many, 1), (many, many, 2), (few, few, 1), (few, many, 1)):
        if integer.supported() and has_units(dtype):
            integer.tiles_of(kind, dtype, out, integer.instruction_set(), size)
    if has_units(few) and amx.supported():
        integer.by_amx(kind)


def _by_amx() -> None:
    from paceline.kernels import amx

    for out in (torch.bfloat16, torch.float32) if amx.supported() else ():
        amx.dense_tiles(out)


def _readers(dtype: type, specs: Sequence[str]) -> None:
    """Drafters that read a corpus of tokens of this type."""
    text: NDArray[Any] = np.array([*map(ord, TEXT)], dtype)
    ends = np.array([6, 12], np.int64)
    with TemporaryDirectory() as folder:
        place = Path(folder) / "corpus"
        with writing(place, kind="corpus", tokenizer="letters", tokenizer_name="letters", eos=ord(".")) as store:
            arrays: dict[str, NDArray[Any]] = {"text": text, "ends": ends}
            for part in (ngrams, suffix_array):
                arrays |= part.build_part(text, ends, VOCABULARY)
            for name, array in arrays.items():
                store.add(name, array)
        for spec in specs:
            create(spec.format(place)).bind(Recording(None, (ord("."),), VOCABULARY))
