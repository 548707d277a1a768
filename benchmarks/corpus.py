"""A corpus: building, size on disk, opening, and what a round's draft costs.

    python benchmarks/corpus.py                  # 10 million tokens
    python benchmarks/corpus.py --tokens 1000000

The text is made up: Zipf-distributed tokens, half of them in copied runs. Its automaton has about 1.48 states and 2.15
transitions a token, as that of English text (1.4 to 1.5, and 2.0 to 2.1). One core. Microseconds a token are processor
time; a draft is the median of many.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.draft.text.automaton import SuffixAutomaton, warm_up
from paceline.draft.text.store import open_store, writing
from paceline.draft.text.suffix_array import SuffixArray, build_part

VOCABULARY = 32_000
ROUNDS, GAINED = 1000, 2


def text(n: int) -> np.ndarray:
    """uint16 [n]."""
    random = np.random.default_rng(0)
    tokens = (random.zipf(1.2, n) % VOCABULARY).astype(np.uint16)
    for at in range(64, n - 16, 32):
        origin = random.integers(0, at - 16)
        tokens[at : at + 16] = tokens[origin : origin + 16]
    return tokens


def dynamic(tokens: np.ndarray) -> float:
    """Microseconds a token of a growing automaton: the best of three."""
    seconds = []
    for _ in range(3):
        automaton = SuffixAutomaton(len(tokens))
        began = time.process_time()
        automaton.extend(tokens)
        seconds.append(time.process_time() - began)
    return 1e6 * min(seconds) / len(tokens)


def save(tokens: np.ndarray, folder: Path) -> None:
    """A corpus store of `tokens` as one document, with the suffix array."""
    with writing(folder, kind="corpus", tokenizer="none", eos=VOCABULARY) as store:
        store.add("text", tokens)
        store.add("ends", np.array([len(tokens)]))
        for name, array in build_part(tokens, np.array([len(tokens)]), VOCABULARY).items():
            store.add(name, array)


def microseconds(spec: str, context: np.ndarray) -> float:
    """Median of a `propose` behind a growing text, GAINED tokens new each time."""
    drafter: Drafter = create(spec)
    drafter.bind(SimpleNamespace(eos_token_ids=(), tokenizer=None))  # type: ignore[arg-type]
    begin = len(context) - ROUNDS * GAINED
    row = Row(0, context[:begin], SamplingParams(max_tokens=2 * len(context)), max_context=1 << 30)
    drafter.start(row)
    drafter.propose([row])
    seconds = []
    for at in range(begin, len(context), GAINED):
        row.extend(context[at : at + GAINED].tolist())
        began = time.perf_counter()
        drafter.propose([row])
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens of the corpus (default 10 million)")
    n = parser.parse_args().tokens
    warm_up()
    SuffixArray(np.zeros(9, np.uint16), np.array([9]), np.arange(9, dtype=np.int32)).warm_up()
    table = Table("what", "", "unit")
    for size in (8192, 131_072):
        table.add_row(f"growing automaton of {size:,} tokens", f"{dynamic(text(size)):.2f}", "µs a token")
    tokens = text(n)
    with tempfile.TemporaryDirectory() as folder:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began, worked = time.perf_counter(), time.process_time()
        save(tokens, Path(folder) / "corpus")
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held)
        began = time.perf_counter()
        store = open_store(Path(folder) / "corpus", kind="corpus")
        SuffixArray.of(store).longest([1, 2, 3])
        opened = time.perf_counter() - began
        table.add_row(f"corpus of {n:,} tokens, built and saved", f"{seconds:.1f}", "s")
        table.add_row("", f"{1e6 * worked / n:.2f}", "µs a token")
        table.add_row("memory in the making", f"{peak / n:.0f}", "bytes a token")
        table.add_row("on disk", f"{sum(store.header['arrays'].values()) / n:.1f}", "bytes a token")
        table.add_row("opened, and a first match", f"{1e3 * opened:.1f}", "ms")
        context = np.concatenate([tokens[:4000], text(2 * ROUNDS * GAINED)[-ROUNDS * GAINED :]])
        for spec in ("sam", f"sam,corpus={folder}/corpus", f"rest:{folder}/corpus", f"suffix,corpus={folder}/corpus"):
            name = spec.replace(f"{folder}/corpus", "PATH")
            table.add_row(f"a round's draft, {name}", f"{microseconds(spec, context):.1f}", "µs")
    Console().print(table)


if __name__ == "__main__":
    main()
