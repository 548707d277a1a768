"""What a suffix tree and a suffix array cost. Prints the tables of docs/methods/suffix.md and rest.md.

    python benchmarks/suffix.py        # about a minute; processor time, the best of five
"""

from collections.abc import Callable
from time import process_time

import numpy as np

from material import VOCAB_SIZE, text
from paceline.draft.methods.rest import Rest, RestConfig
from paceline.draft.text.suffix_array import SuffixArray, build_part
from paceline.draft.text.suffix_tree import SuffixTree, warm_up

DEPTH = 24


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """Processor time of the fastest run."""
    taken = []
    for _ in range(times):
        began = process_time()
        work()
        taken.append(process_time() - began)
    return min(taken)


def tree_of(tokens: np.ndarray) -> SuffixTree:
    tree = SuffixTree(DEPTH, len(tokens))
    tree.append(tokens)
    tree.close()
    return tree


def print_trees() -> None:
    warm_up()
    print("| tokens in the tree | microseconds a token appended | taken out | microseconds a speculation |")
    print("|---|---:|---:|---:|")
    for n in (2048, 32_768, 262_144):
        tokens = text(n)
        append = seconds(lambda tokens=tokens: tree_of(tokens))  # type: ignore[misc]
        removed = [tree_of(tokens) for _ in range(3)]
        remove = seconds(lambda removed=removed: removed.pop().remove(), 3)  # type: ignore[misc]
        tree = tree_of(tokens)
        contexts = [tokens[i : i + DEPTH - 1] for i in range(0, n - DEPTH, n // 500)]
        ask = seconds(lambda tree=tree, contexts=contexts: [tree.speculate(one, DEPTH) for one in contexts])  # type: ignore[misc]
        print(f"| {n:,} | {1e6 * append / n:.2f} | {1e6 * remove / n:.2f} | {1e6 * ask / len(contexts):.0f} |")


def heaviest(array: SuffixArray, places: list[tuple[int, int]], hits: int) -> str:
    """Microseconds to find the 64 heaviest nodes behind one of `places`."""
    drafter = Rest(RestConfig("none", hits=hits))
    drafter._array = array
    taken = seconds(lambda: [drafter.heaviest(*one, 1, 10, frozenset()) for one in places])
    return f"{1e6 * taken / len(places):.0f}"


def print_arrays() -> None:
    """The table of suffix arrays, by the size of the corpus."""
    columns = "seconds to build | microseconds to find the longest suffix | a tree, `hits=5000` | `hits=1000`"
    print(f"\n| tokens in the corpus | {columns} |")
    print("|---|---:|---:|---:|---:|")
    for n in (100_000, 1_000_000, 10_000_000):
        tokens = text(n).astype(np.uint16)
        ends = np.append(np.arange(500, n, 500), n)
        tokens[ends - 1] = 2
        array = SuffixArray(tokens, ends, build_part(tokens, ends, VOCAB_SIZE)["suffix_positions"])
        build = seconds(lambda tokens=tokens, ends=ends: build_part(tokens, ends, VOCAB_SIZE), 1)  # type: ignore[misc]
        contexts = [tokens[i : i + 16].astype(np.int64) for i in range(0, n - 16, n // 2000)]
        find = seconds(lambda array=array, contexts=contexts: [array.longest(one) for one in contexts])  # type: ignore[misc]
        # The 50 most frequent tokens: places enough behind each that `hits` of them are counted.
        places = [array.find([token]) for token in np.bincount(tokens).argsort()[::-1][:50] if token != 2]
        places = [(lo, hi) for lo, hi in places if hi - lo >= 5000]
        trees = [heaviest(array, places, hits) for hits in (5000, 1000)]
        print(f"| {n:,} | {build:.2f} | {1e6 * find / len(contexts):.1f} | {' | '.join(trees)} |")


if __name__ == "__main__":
    print_trees()
    print_arrays()
