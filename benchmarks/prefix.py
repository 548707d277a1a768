"""What it saves to compute the shared beginning of prompts once: prompt tokens that are run, and seconds.

    python benchmarks/prefix.py models/demo -d none -d sam

Two kinds of traffic, one request at a time: a chat of five turns, and three growing requests as Align3 makes them (a
thought in three steps, each of which goes on from the one before). Engines with and without reuse take turns.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

TURNS = [
    "Explain in a few sentences how a water mill turns grain into flour, and name the most important parts.",
    "Which of these parts wears out first, and how often would a miller have to replace it?",
    "Write down the daily work of a miller in the year 1790, from the morning to the evening.",
    "Shorten that to three sentences that a child understands.",
    "Now repeat everything that you said about the parts of the mill.",
]
RULE = "Rule {0}: an answer must be honest, short, and safe for every reader, case {0}."
RULES = " ".join(map(RULE.format, range(1, 25)))
STEPS = [
    "First go through the behavioural rules one by one.",
    "Then go through the safety rules one by one.",
    "At last look at all rules together and answer.",
]
TOKENS, PASSES = 48, 5
"""Tokens an answer; times that either engine answers all."""


def chat(engine: Engine) -> tuple[int, int, list[list[int]]]:
    """Prompt tokens, those that were not run, and the answers, of a conversation."""
    messages, prompts, reused, answers = [], 0, 0, []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        (done,) = engine.generate([messages], SamplingParams(max_tokens=TOKENS))
        messages.append({"role": "assistant", "content": done.text})
        prompts, reused = prompts + done.prompt_tokens, reused + done.reused
        answers.append(done.tokens)
    return prompts, reused, answers


def align(engine: Engine) -> tuple[int, int, list[list[int]]]:
    """The same of three requests: each is the one before, what it wrote, and the next step."""
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": f"{RULES} May I feed bread to a duck?"}])
    prompts, reused, answers = 0, 0, []
    for step in STEPS:
        prompt = [*prompt, *engine.tokenizer.encode_text(step)]
        (done,) = engine.generate([prompt], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        prompt = [*prompt, *done.tokens]
        prompts, reused = prompts + done.prompt_tokens, reused + done.reused
        answers.append(done.tokens)
    return prompts, reused, answers


def main() -> None:
    """Print a line for each drafter and kind of traffic."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-d", "--draft", action="append", required=True)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    first = Engine(options.model, dtype=options.dtype)
    print("| drafter | traffic | prompt tokens | run with reuse | seconds without | seconds with | same answers |")
    print("|---|---|---:|---:|---:|---:|---|")
    for draft in options.draft:
        for traffic in (chat, align):
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(PASSES + 1):
                results = {}
                for reuse in (False, True):
                    engine = Engine(first.target, draft, tokenizer=first.tokenizer, reuse=reuse, max_batch=1)
                    began = perf_counter()
                    results[reuse] = traffic(engine)
                    seconds[reuse].append(perf_counter() - began)
            (prompts, _, plain), (_, reused, answers) = results[False], results[True]
            without, with_ = (median(seconds[reuse][1:]) for reuse in (False, True))  # the first pass warms up
            cells = [draft, traffic.__name__, f"{prompts:,}", f"{prompts - reused:,}", f"{without:.2f}", f"{with_:.2f}"]
            print("| " + " | ".join([*cells, "yes" if plain == answers else "NO"]) + " |", flush=True)


if __name__ == "__main__":
    main()
