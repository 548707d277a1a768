"""Our loop behind transformers' `generate`: as fast as plain on every task, and ahead of its prompt lookup?

    python benchmarks/transformers_plugin.py models/demo QUESTIONS.jsonl --questions 48

QUESTIONS.jsonl has Spec-Bench's form; first turns, as many of each task, greedy, float32, one thread, one process. The
engines answer every question in turns. Speeds are by processor time, which other programs on the machine change less
than the clock on the wall; the last column has that one too.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic, process_time

from paceline.bench.suites import read_suite
from paceline.target.load import load_tokenizer, read_config
from paceline.workbench.contestant import Ask
from paceline.workbench.peers import create_peer

SPECS = ("transformers", "transformers-paceline,draft=sam", "transformers-lookup")
OVERALL = "overall"


def main() -> None:
    """A line for every task: tokens a second of plain decoding, and what the others are times as fast."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("questions_file")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=4.0, help="no further question is asked after these")
    parser.add_argument("--peer", action="append", help="others than these: " + " ".join(SPECS))
    given = parser.parse_args()
    tokenizer = load_tokenizer(str(given.model))
    ends = read_config(given.model).eos_token_id
    ask = Ask(max_tokens=given.max_tokens, ends=tuple(ends) if isinstance(ends, list) else (ends,))
    specs = given.peer or SPECS
    peers = [
        create_peer(
            spec, str(given.model), dtype="float32", threads=1, python=None, batch=1, max_context=2048,
            decode=tokenizer.decode,
        )
        for spec in specs
    ]  # fmt: skip
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    rounds: dict[tuple[str, str], int] = defaultdict(int)
    processor: dict[tuple[str, str], float] = defaultdict(float)
    wall: dict[tuple[str, str], float] = defaultdict(float)
    asked, alike = 0, 0
    suite = read_suite(given.questions_file, limit=given.questions)
    with ExitStack() as opened:
        for peer in peers:
            opened.enter_context(closing(peer)).open()
            peer.answer([tokenizer.encode_chat([{"role": "user", "content": "one two one two"}])], ask)
        until = monotonic() + 60 * given.minutes
        for question in suite.questions:
            prompt = tokenizer.encode_chat([{"role": "user", "content": question.turns[0]}])
            said = []
            for spec, peer in zip(specs, peers, strict=True):
                began, clock = process_time(), monotonic()
                (reply,) = peer.answer([prompt], ask)
                spent, passed = process_time() - began, monotonic() - clock
                for task in (question.task, OVERALL):
                    tokens[spec, task] += len(reply.tokens)
                    rounds[spec, task] += len(reply.lengths or [])
                    processor[spec, task] += spent
                    wall[spec, task] += passed
                said.append(reply.tokens)
            asked, alike = asked + 1, alike + all(one == said[0] for one in said)
            if monotonic() > until:
                break
    print(f"{asked} questions; in {alike} all answers are the same")
    tasks = sorted({task for _, task in tokens} - {OVERALL})
    for task in (*tasks, OVERALL):
        speeds = [[tokens[spec, task] / of[spec, task] for spec in specs] for of in (processor, wall)]
        figures = [
            f"{spec} {speeds[0][i] / speeds[0][0]:.2f} ({speeds[1][i] / speeds[1][0]:.2f} by the wall, "
            f"{tokens[spec, task] / rounds[spec, task]:.2f} tokens a round)"
            for i, spec in enumerate(specs)
        ]
        print(f"{task}: {speeds[0][0]:.1f} tokens/s plain; " + "; ".join(figures[1:]))


if __name__ == "__main__":
    main()
