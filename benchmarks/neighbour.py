"""What other processes that want the cores cost plain decoding: ours, and transformers' `generate`, tokens a second.

    python benchmarks/neighbour.py models/demo
    GOMP_SPINCOUNT=1000 python benchmarks/neighbour.py models/demo      # torch's OpenMP as the environment says

Beside no, one and two processes that compute for ever; torch's own number of threads, one thread, and for our engine
the number it chooses. Each way in a process of its own, beside which the others come and go; the ways in turn. A figure
is all tokens over all seconds, those until threads are chosen anew included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter, sleep

import torch

PROMPT = [*range(100, 140)]
TOKENS = 64
WAYS = (("ours", "chosen"), ("ours", "all"), ("ours", "one"), ("transformers", "all"), ("transformers", "one"))


def main() -> None:
    """Measure every way beside every number of neighbours, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a Hugging Face id")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default 4)")
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        who, threads = options.way
        measure(options.model, who, threads, options.seconds)
        return
    figures: dict[tuple[str, str, int], list[float]] = {}
    for turn in range(options.turns):
        for who, threads in WAYS:
            found = beside(options.neighbours, (who, threads), options.model, options.seconds)
            print(f"turn {turn}: {who}, {threads}:", *(f"{value:.1f}" for value in found), file=sys.stderr, flush=True)
            for count, value in zip(options.neighbours, found, strict=True):
                figures.setdefault((who, threads, count), []).append(value)
    print(f"tokens/s, median of {options.turns} (smallest to largest); {torch.get_num_threads()} threads are all")
    print(f"| neighbours | {' | '.join(map(str, options.neighbours))} |")
    for who, threads in WAYS:
        cells = [shown(figures[who, threads, count]) for count in options.neighbours]
        print(f"| {who}, {threads} | {' | '.join(cells)} |")


def shown(values: Sequence[float]) -> str:
    """A cell of the table."""
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def beside(counts: Sequence[int], way: Sequence[str], model: str, seconds: float) -> list[float]:
    """What one way does in a process of its own beside these numbers of busy ones, one after another."""
    command = [sys.executable, __file__, model, "--seconds", str(seconds), "--way", *way]
    found = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
        for count in counts:
            with neighbours(count):
                print(file=process.stdin, flush=True)
                found.append(float(process.stdout.readline()))
        process.stdin.close()
    return found


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        sleep(0.2 * bool(count))
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(model: str, who: str, threads: str, seconds: float) -> None:
    """For every line that comes, print the tokens a second of answers of TOKENS tokens, for so many seconds."""
    if threads == "one":
        torch.set_num_threads(1)
    answer = ours(model, chosen=threads == "chosen") if who == "ours" else transformers(model)
    for _ in range(3):
        next(answer)
    print("ready", flush=True)
    for _ in sys.stdin:
        began, count = perf_counter(), 0
        while perf_counter() - began < seconds:
            count += next(answer)
        print(count / (perf_counter() - began), flush=True)


def ours(model: str, chosen: bool) -> Iterator[int]:
    """Tokens of one answer after another, by Paceline."""
    from paceline import Engine, SamplingParams

    engine = Engine(model, threads=None if chosen else torch.get_num_threads(), reuse=False)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    while True:
        yield sum(len(delta.tokens) for delta in engine.stream([PROMPT], params))


def transformers(model: str) -> Iterator[int]:
    """The same by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    prompt = torch.tensor([PROMPT])
    how = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    while True:
        yield target.generate(prompt, attention_mask=torch.ones_like(prompt), **how).shape[1] - len(PROMPT)


if __name__ == "__main__":
    main()
