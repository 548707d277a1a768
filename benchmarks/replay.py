"""How long `paceline replay` takes for many answers: a log is made of recorded answers, and replayed.

    python benchmarks/replay.py ../shared/data/traces/alpaca-eval/*.jsonl.gz --answers 100000 --workers 2

The recordings' answers are repeated until there are enough. Each time an answer comes again it begins with another of
its sentences, so that no two lines are alike. --profile says where reading spends its time.
"""

import argparse
import json
import subprocess
import sys
from cProfile import Profile
from itertools import count, islice
from pathlib import Path
from pstats import Stats
from tempfile import TemporaryDirectory

from paceline.draft.recording import Recording
from paceline.workbench.conversations import Reading, read_trace
from paceline.workbench.transcript import Transcriber, open_tokenizer

DRAFTERS = ("prompt-lookup", "sam", "suffix", "hierarchy", "sam+prompt-lookup")


def lines(traces, answers):
    """`answers` lines: prompts and responses of the traces, in turn."""
    recorded = [(one.messages[0]["content"], one.messages[-1]["content"].split(". ")) for one in read_trace(*traces)]

    def endless():
        for lap in count():
            for prompt, said in recorded:
                at = lap % max(len(said), 1)
                yield {"prompt": prompt, "response": ". ".join(said[at:] + said[:at])}

    return islice(endless(), answers)


def main():
    """Make the log, replay it, and print how long that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--tokenizer", default="models/demo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="read in this process, and say where the time goes")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        with log.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines(asked.traces, asked.answers))
        print(f"{asked.answers:,} answers, {log.stat().st_size / 1e6:.0f} MB", flush=True)
        if asked.profile:
            profile_reading(log, open_tokenizer(asked.tokenizer))
            return
        drafts = [word for name in DRAFTERS for word in ("-d", name)]
        command = [sys.executable, "-m", "paceline", "replay", log, "--tokenizer", asked.tokenizer, *drafts]
        subprocess.run([*command, "--workers", str(asked.workers)], check=True)


def profile_reading(log, tokenizer):
    reading, profile = Reading(), Profile()
    with profile:
        exchanges = read_trace(log, reading=reading)
        tokens = sum(one.new_tokens for one in Transcriber(tokenizer).conversations(exchanges, reading))
    print(f"{tokens:,} tokens; {Recording.of(tokenizer).vocab_size:,} in the vocabulary")
    Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
