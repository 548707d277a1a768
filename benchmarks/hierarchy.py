"""What hierarchy would have had accepted on recorded answers, and what each store had to do with it.

    python benchmarks/hierarchy.py order=WS order=WSL,model=STORE,corpus=STORE     # needs the optional data
    python benchmarks/hierarchy.py time                                            # the stores' own cost

The trace is Vicuna-7B's answers to Spec-Bench. Microseconds are processor time of a round's `propose` on one core.
Prints the tables of docs/methods.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter, thread_time

import numpy as np

from material import EOS, VOCAB_SIZE, best, conversations, text
from paceline.core.request import Row
from paceline.core.tree import DraftTree
from paceline.draft.methods.hierarchy import Hierarchy
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.draft.text.ngrams import Gram, PastNgrams, RecentNgrams, build_part
from paceline.workbench.walk import Tally, replay


class Watched(Hierarchy):
    """Notes, by store: rounds it was `asked` in, sequences it `gave`, rounds in which a sequence of it was the longest
    right one (`hits`; of two as long the store's that was asked first), and the tokens `kept` then."""

    asked: Counter[str]
    gave: Counter[str]
    hits: Counter[str]
    kept: Counter[str]
    seconds: list[float]

    def watch(self) -> None:
        self.asked, self.gave, self.hits, self.kept, self.seconds = Counter(), Counter(), Counter(), Counter(), []
        self._stores = {letter: self._watched(letter, ask) for letter, ask in self._stores.items()}

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        self._round: list[tuple[str, Gram]] = []
        began = thread_time()
        trees = super().propose(rows)
        self.seconds.append(thread_time() - began)
        (row,) = rows
        truth = row.recorded[len(row) : -1][: self.config.n - 1]  # type: ignore[attr-defined]
        most = len(truth)
        right = [(int((np.array(gram)[:most] == truth[: len(gram)]).cumprod().sum()), one) for one, gram in self._round]
        kept, letter = max(right, key=lambda one: one[0], default=(0, ""))
        if kept:
            self.hits[letter] += 1
            self.kept[letter] += int(kept)
        return trees

    def _watched(self, letter: str, ask: Callable[[Row], Iterator[Gram]]) -> Callable[[Row], Iterator[Gram]]:
        def asked(row: Row) -> Iterator[Gram]:
            self.asked[letter] += 1
            for gram in ask(row):
                self.gave[letter] += 1
                self._round.append((letter, gram))
                yield gram

        return asked


def print_times() -> None:
    """Best of 7, or the median of many, on text that repeats itself."""
    tokens = text(1 << 20).astype(np.int32)
    ends = np.arange(1024, len(tokens) + 1, 1024)
    prompt = tokens[:4096].astype(np.int64)
    context = RecentNgrams(5, 7)
    updates, lookups = [], []
    for end in range(1000, len(prompt), 3):
        began = perf_counter()
        context.update(prompt[:end])
        updated = perf_counter()
        context.after(int(prompt[end - 1]))
        updates.append(updated - began)
        lookups.append(perf_counter() - updated)
    learn = best(lambda: PastNgrams(5, 7).learn(prompt)) / len(prompt)
    insert = best(lambda: RecentNgrams(5, 7).update(prompt)) / len(prompt)
    build = best(lambda: build_part(tokens, ends, VOCAB_SIZE), 3) / len(tokens)
    print(f"a round of 3 tokens: taken in {1e6 * median(updates):.1f} us, looked up {1e6 * median(lookups):.1f} us")
    each = f"a prompt {1e6 * insert:.2f} us, a finished request {1e6 * learn:.2f} us, a corpus {1e6 * build:.2f} us"
    print(f"a token of {each}")


def main(options: list[str]) -> None:
    """Replay the trace with every spec, and print what was accepted and from which store."""
    target = Recording(None, (EOS,), VOCAB_SIZE)
    turns = [turn for one in conversations() for turn in one.turns]
    stores = ["| | store | rounds asked | sequences given | rounds it was the best | tokens accepted then |"]
    stores.append("|---|---|---:|---:|---:|---:|")
    print("| | tokens a round | drafted a round | rounds with a draft | microseconds: median | mean | p99 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for option in options:
        made = create(f"hierarchy,{option}")
        assert isinstance(made, Hierarchy)
        drafter, done = Watched(made.config), Tally()
        drafter.bind(target)
        drafter.watch()
        for id, turn in enumerate(turns):
            replay(drafter, turn, id, done)
        drafted, micro = done.drafted / done.rounds, 1e6 * np.array(drafter.seconds)
        times = f"{median(micro):.1f} | {micro.mean():.1f} | {np.quantile(micro, 0.99):.0f}"
        counts = f"{done.mean_accepted_tokens:.3f} | {drafted:.1f} | {done.draft_rate:.1%}"
        print(f"| {option} | {counts} | {times} |", flush=True)
        for letter, asked in drafter.asked.items():
            gave, hits = drafter.gave[letter] / asked, drafter.hits[letter]
            accepted = drafter.kept[letter] / max(hits, 1)
            shares = f"{asked / done.rounds:.1%} | {gave:.1f} | {hits / done.rounds:.1%} | {accepted:.2f}"
            stores.append(f"| {option} | {letter} | {shares} |")
    print("\n" + "\n".join(stores))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print_times() if sys.argv[1:] == ["time"] else main(sys.argv[1:])
