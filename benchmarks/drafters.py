"""What drafters bring on a model, what a draft costs, and which shape of a tree pays.

    python benchmarks/drafters.py accept models/demo sam recycling medusa:models/demo-medusa --prompts FILE --every 12
    python benchmarks/drafters.py accept smollm2 eagle3:E dflash:D dflash:D2 --prompts FILE --before 0 2000 8000
    python benchmarks/drafters.py time sam suffix rest:CORPUS prompt-lookup,variant=vllm
    python benchmarks/drafters.py shapes models/demo --prompts FILE      # of recycling's trees of 8, 16 and 32 nodes

accept  greedy answers (or at --temperature), one at a time unless --batch says otherwise, each drafter from a cold
        start and with its method's own lengths, whatever they cost. Answers that run into a loop are the easiest to
        draft, so what the others alone give has a column of its own. A draft's time is all that the drafter does in a
        round: reading new states, guessing, learning what became of it. With --before N, every question comes after N
        tokens of the texts that follow it in the file, or as many as the context has room for.
time    microseconds of a draft behind a growing text, by the length of the text: Zipf-distributed tokens, half of them
        in copied runs, or with --nothing never a token that was there before. For drafters without a model.
shapes  counts, for every path of ranks in recycling's largest tree, how often the target's own tokens took it.

Drafters on recorded answers: `paceline replay`. A prompts file is JSON Lines with "prompt", "messages" or "turns"
(Spec-Bench's question.jsonl: the first turn is asked); --every N takes each Nth line, --characters cuts long texts.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from paceline.bench.record import is_looping
from paceline.core.request import Completion, Row
from paceline.core.round import Round
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Ask
from paceline.draft.methods.recycling import TREES, Recycling, RecyclingConfig
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.draft.shapes import RankPath
from paceline.engine.engine import Engine
from paceline.formats.tokenizer import Tokenizer
from paceline.target.load import load, load_tokenizer

VOCAB_SIZE, EOS = 32_000, 2
"""Of the made-up text."""
ROUNDS, GAINED = 300, 3
"""Drafts that are timed, and tokens that are new in each."""


def read_prompts(file: str, tokenizer: Tokenizer, every: int, characters: int, before: int = 0) -> list[list[int]]:
    """Token ids of each `every`th line of `file`, as chats; about `before` tokens of the lines after it come first."""
    lines = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]
    texts = [line["turns"][0] if "turns" in line else line.get("prompt") for line in lines]
    asked = zip(lines, texts, strict=True)
    chats = [line.get("messages") or [{"role": "user", "content": text}] for line, text in asked]
    chats = [[{**m, "content": m["content"][:characters]} for m in chat] for chat in chats]
    prompts = []
    for n in range(0, len(chats), every):
        others, lead = "\n\n".join(chat[0]["content"] for chat in chats[n + 1 :] + chats[:n]), ""
        if before:
            repeated = others * (1 + 8 * before // len(others))
            lead = tokenizer.decode(tokenizer.encode_text(repeated[: 8 * before])[:before]) + "\n\n"
        first, *more = chats[n]
        prompts.append(tokenizer.encode_chat([{**first, "content": lead + first["content"]}, *more]))
    return prompts


def text(n: int) -> np.ndarray:
    """Zipf-distributed tokens of which half stand in copied spans, as in text that repeats its prompt. int64 [n]."""
    random = np.random.default_rng(0)
    made = random.zipf(1.2, n) % VOCAB_SIZE
    for at in range(64, n - 16, 32):
        origin = random.integers(0, at - 16)
        made[at : at + 16] = made[origin : origin + 16]
    return made


def accept(asked: argparse.Namespace) -> None:
    """One line a drafter, all over the same prompts; a table for each length of the text before them."""
    target, tokenizer = load(asked.model, dtype=asked.dtype), load_tokenizer(asked.model)
    alone = read_prompts(asked.prompts, tokenizer, asked.every, asked.characters)
    room = target.max_context - asked.max_tokens - max(map(len, alone)) - 32  # a text cut in tokens may have a few more
    for before in asked.before:
        after = (tokenizer, asked.every, asked.characters, min(before, room))
        accept_after(asked, target, tokenizer, read_prompts(asked.prompts, *after) if before else alone)


def accept_after(asked: argparse.Namespace, target: Any, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    """Print a table: what each drafter of `asked.specs` brings on these prompts, token ids, and what it costs."""
    params = SamplingParams(max_tokens=asked.max_tokens, temperature=asked.temperature, seed=0)
    columns = "parameters", "mean accepted (95 %)", "not looping", "nodes a round", "positions a token", "accepted"
    print(f"| | {' | '.join(columns)} | ms a draft | ms a forward |")
    print(f"|---|{'---:|' * 8}")
    for spec in asked.specs:
        engine = Engine(target, spec, tokenizer=tokenizer, max_batch=asked.batch, reuse=False, budget=False)
        Engine(target, spec, tokenizer=tokenizer).generate(prompts[:1], SamplingParams(max_tokens=8))  # compiled
        done = engine.generate(prompts, params)
        calm = [one for one in done if not is_looping(one.tokens)]
        rounds, tokens = sum(one.rounds for one in done), sum(one.new_tokens for one in done)
        nodes = sum(one.stats.draft_tokens for one in done)
        right = sum(n * count for one in done for n, count in enumerate(one.stats.accepted))
        parts = engine.profile.parts
        draft, forward = (
            1000 * sum(parts.get(part, 0.0) for part in names) / engine.rounds
            for names in (("draft", "observe"), ("prepare", "layers", "head"))
        )
        low, high = interval(done)
        cells = [f"{parameters(spec) / 1e6:.2f} M", f"{mean_accepted(done):.3f} ({low:.2f} to {high:.2f})"]
        cells += [f"{mean_accepted(calm):.3f}"]
        cells += [f"{nodes / rounds:.1f}", f"{(nodes + rounds) / tokens:.1f}"]
        cells += [f"{right / max(nodes, 1):.2f}", f"{draft:.2f}", f"{forward:.2f}"]
        print(f"| {spec} | {' | '.join(cells)} |", flush=True)
    mean = sum(map(len, prompts)) / len(prompts)
    print(f"{len(done)} answers, {tokens} tokens, after {mean:,.0f}; {len(done) - len(calm)} answers loop", flush=True)


def mean_accepted(done: Sequence[Completion]) -> float:
    """Tokens a round."""
    return sum(one.new_tokens for one in done) / max(sum(one.rounds for one in done), 1)


def interval(done: Sequence[Completion], resamples: int = 2000) -> tuple[float, float]:
    """The 95 % interval of `mean_accepted`: a bootstrap over the answers."""
    counts = np.array([[one.new_tokens, one.rounds] for one in done])
    drawn = counts[np.random.default_rng(0).integers(len(counts), size=(resamples, len(counts)))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(low), float(high)


def parameters(spec: str) -> int:
    """Numbers in the file of weights that a drafter names; 0 without one."""
    checkpoint = getattr(getattr(create(spec), "config", None), "checkpoint", None)
    file = Path(checkpoint or "") / "model.safetensors"
    if not file.is_file():
        return 0
    with safe_open(file, "np") as weights:
        return sum(int(np.prod(weights.get_slice(name).get_shape())) for name in weights.keys())  # noqa: SIM118


def time(asked: argparse.Namespace) -> None:
    """One line a drafter."""
    print(f"| microseconds a draft, text of | {' | '.join(f'{n:,}' for n in asked.contexts)} tokens |")
    print(f"|---|{'---:|' * len(asked.contexts)}")
    for spec in asked.specs:
        times = (f"{microseconds(spec, context, asked.nothing):.1f}" for context in asked.contexts)
        print(f"| {spec} | {' | '.join(times)} |", flush=True)


def microseconds(spec: str, context: int, nothing: bool) -> float:
    """Median of a `propose` behind `context` tokens and more. nothing: there is no match."""
    drafter = create(spec)
    drafter.bind(Recording(None, (EOS,), VOCAB_SIZE))
    tokens = text(context + ROUNDS * GAINED)
    row = Row(0, tokens[:context], SamplingParams(max_tokens=ROUNDS * (GAINED + 1)), max_context=1 << 20)
    drafter.start(row)
    drafter.propose([Ask(row, row.max_draft)])
    seconds = []
    for at in range(context, context + ROUNDS * GAINED, GAINED):
        row.extend([VOCAB_SIZE + at] if nothing else tokens[at : at + GAINED].tolist())
        began = perf_counter()
        drafter.propose([Ask(row, row.max_draft)])
        seconds.append(perf_counter() - began)
    return 1e6 * median(seconds)


class Counting(Recycling):
    """Counts, for every rank path, the rounds in which the target's own tokens took it."""

    def __init__(self, config: RecyclingConfig):
        super().__init__(config)
        self.taken: Counter[RankPath] = Counter()

    def observe(self, round: Round) -> None:
        for tree, done in zip(round.trees, round.accepted, strict=True):
            token, path = int(tree.tokens[0]), ()
            for decided in done.tokens if len(tree) > 1 else []:
                ranks = np.flatnonzero(self.matrix[token] == decided)
                if not len(ranks):
                    break
                token, path = decided, (*path, int(ranks[0]))
                self.taken[path] += 1
        super().observe(round)


def shapes(asked: argparse.Namespace) -> None:
    """Of the paper's paths those taken most often, for every budget. A path is never taken more often than its
    beginning, so they are a tree, and no other part of the paper's would have had more accepted in these rounds."""
    target, tokenizer = load(asked.model, dtype=asked.dtype), load_tokenizer(asked.model)
    counting = Counting(RecyclingConfig())
    engine = Engine(target, counting, tokenizer=tokenizer, max_batch=1, reuse=False, budget=False)
    rounds = 0
    for prompt in read_prompts(asked.prompts, tokenizer, asked.every, asked.characters):
        before = counting.taken.copy()
        (done,) = engine.generate([prompt], SamplingParams(max_tokens=asked.max_tokens))
        if is_looping(done.tokens):
            counting.taken = before
        else:
            rounds += done.rounds
    print(f"{rounds} rounds of answers that do not loop")
    ordered = sorted(paths_of(80), key=lambda path: (-counting.taken[path], len(path), path))
    for budget in (8, 16, 32, 60):
        chosen = sorted(ordered[:budget], key=lambda path: (len(path), path))
        taken = sum(counting.taken[path] for path in chosen)
        print(f"{budget}: {taken / rounds:.3f} accepted a round:", *("".join(map(str, path)) for path in chosen))
    for size in TREES:
        print(f"built in, {size}: {sum(counting.taken[path] for path in paths_of(size)) / rounds:.3f} accepted a round")


def paths_of(size: int) -> list[RankPath]:
    """The paths of a built-in shape."""
    return [tuple(map(int, word)) for word in TREES[size].split()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: Any = parser.add_subparsers(dest="what", required=True)
    timing = commands.add_parser("time")
    timing.add_argument("specs", nargs="+")
    timing.add_argument("--contexts", type=int, nargs="+", default=[256, 2048, 16384])
    timing.add_argument("--nothing", action="store_true", help="there is nothing to copy")
    accepting, shaping = commands.add_parser("accept"), commands.add_parser("shapes")
    for one in (accepting, shaping):
        one.add_argument("model")
        one.add_argument("--prompts", default="src/paceline/cli/demo-prompts-tiny.jsonl")
        one.add_argument("--every", type=int, default=1)
        one.add_argument("--characters", type=int, default=1500, help="of a text, at most (default 1500)")
        one.add_argument("--max-tokens", type=int, default=96, help="new tokens, at most (default 96)")
        one.add_argument("--dtype", default="auto")
    accepting.add_argument("specs", nargs="+")
    accepting.add_argument("--batch", type=int, default=1, help="answers at a time (default 1)")
    accepting.add_argument("--before", type=int, nargs="+", default=[0], help="tokens of text before each question")
    accepting.add_argument("--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    {"accept": accept, "time": time, "shapes": shapes}[asked.what](asked)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
