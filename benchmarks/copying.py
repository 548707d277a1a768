"""What drafting costs, and what it yields on recorded answers. Prints the tables of docs/methods.

    python benchmarks/copying.py time                          # microseconds
    python benchmarks/copying.py replay sam sam,grow=0         # tokens a round (needs the optional data)
"""

import sys
from statistics import median
from time import perf_counter
from types import SimpleNamespace

from material import EOS, VOCAB_SIZE, best, conversations, text
from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.draft.text.automaton import SuffixAutomaton
from paceline.replay.report import OVERALL, Report
from paceline.replay.workers import start

SPECS = ("prompt-lookup", "prompt-lookup,variant=transformers", "prompt-lookup,variant=vllm", "sam")
CONTEXTS = (256, 2048, 16384)
ROUNDS, GAINED = 200, 3


def microseconds(spec: str, context: int, nothing: bool) -> float:
    """Median of a `propose` behind `context` tokens and more, GAINED new each time; `nothing`: there is no match."""
    drafter = create(spec)
    drafter.bind(SimpleNamespace(eos_token_ids=()))  # type: ignore[arg-type]
    tokens = text(context)
    room = ROUNDS * (GAINED + 1)
    one = Row(0, tokens[:context], SamplingParams(max_tokens=room), max_context=1 << 20)
    drafter.start(one)
    drafter.propose([one])
    seconds = []
    for i in range(ROUNDS):
        new = [40_000 + i] if nothing else tokens[i * GAINED : (i + 1) * GAINED].tolist()
        one.extend(new)
        began = perf_counter()
        drafter.propose([one])
        seconds.append(perf_counter() - began)
    return 1e6 * median(seconds)


def print_times() -> None:
    print(f"| microseconds a draft, text of | {' | '.join(f'{c:,}' for c in CONTEXTS)} tokens |")
    print("|---|" + "---:|" * len(CONTEXTS))
    for spec in SPECS:
        for nothing in (False, True):
            times = " | ".join(f"{microseconds(spec, context, nothing):.1f}" for context in CONTEXTS)
            print(f"| {spec}{', nothing to find' if nothing else ''} | {times} |", flush=True)
    for n in (256, 8192, 32_768, 131_072):
        tokens = text(n)
        seconds = best(lambda tokens=tokens: SuffixAutomaton(len(tokens)).extend(tokens))  # type: ignore[misc]
        print(f"automaton of {n:,} tokens: {1e3 * seconds:.2f} ms, {1e6 * seconds / n:.2f} microseconds a token")


def print_replays(specs: list[str]) -> None:
    """What `paceline replay` says of each drafter, in three columns."""
    answers = conversations()
    report = Report(specs, answers)
    for done in start(answers, specs, Recording(None, (EOS,), VOCAB_SIZE)):
        report.add(done)
    print("| | tokens a round | drafted a round | rounds with a draft |")
    print("|---|---:|---:|---:|")
    for s, spec in enumerate(specs):
        tally = report.tallies[s, OVERALL]
        drafted = tally.verified_per_round - 1
        print(f"| {spec} | {tally.mean_accepted_tokens:.3f} | {drafted:.1f} | {tally.draft_rate:.1%} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["time"]:
        print_times()
    elif sys.argv[1:2] == ["replay"]:
        print_replays(sys.argv[2:] or list(SPECS))
    else:
        sys.exit(__doc__)
