"""Our drafters in vLLM: plain vLLM's answers, as many tokens a round as the drafter replayed, faster than its ngram?

    python benchmarks/vllm_plugin.py models/demo QUESTIONS.jsonl --python ENV/bin/python --questions 8

QUESTIONS.jsonl has Spec-Bench's form; first turns, spread over the file, greedy, float32, one thread, one request at a
time and 8 at a time, where the next question joins as soon as one is answered. The engines take turns after every 24
questions, so that a machine that slows down is fair to all. An answer that differs from plain vLLM's is judged as
`paceline certify` does: a tie, or a bug. The replay cuts no drafts, and has more tokens a round where vLLM's are cut.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np

from paceline.certify.certificate import measured, replayed
from paceline.certify.greedy import Greedy
from paceline.certify.reference import Reference
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.workbench.contestant import Ask, Contestant, Reply
from paceline.workbench.peers import create_peer

SPECS = ("vllm,eager=true", "vllm-paceline,eager=true,draft=sam", "vllm-ngram,eager=true")
CONTEXT = 1024
BATCHES = (1, 8)
PART = 24
"""Questions between two engines' turns."""


@dataclass
class Ran:
    """Everything that one engine said in one size of batch, and the seconds it took."""

    replies: list[Reply] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def answers(self) -> list[list[int]]:
        return [reply.tokens for reply in self.replies]

    def line(self, plain: Ran) -> str:
        """Its figures, beside plain decoding's."""
        rate = measured([reply.lengths or [] for reply in self.replies])
        speed, base = (sum(map(len, ran.answers)) / ran.seconds for ran in (self, plain))
        same = sum(a == b for a, b in zip(self.answers, plain.answers, strict=True))
        return (
            f"{rate:.3f} tokens a round, {speed:.1f} tokens/s ({speed / base:.2f} of plain), "
            f"{same} of {len(self.replies)} answers plain vLLM's"
        )


def main() -> None:
    """A line for every engine and batch size, then the replay of our drafter over plain vLLM's answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("questions_file", type=Path)
    parser.add_argument("--python", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--minutes", type=float, default=15.0, help="no further questions are asked after these")
    given = parser.parse_args()
    engine = Engine(given.model, dtype="float32")
    assert engine.tokenizer is not None
    target, tokenizer = engine.target, engine.tokenizer
    asked = [json.loads(line)["turns"][0] for line in given.questions_file.read_text("utf-8").splitlines()]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
    prompts = [prompt for prompt in prompts if len(prompt) + given.max_tokens < CONTEXT]
    # Spread over the file, and shuffled, so that a run that is cut short has seen all tasks.
    chosen = np.random.default_rng(0).permutation(np.linspace(0, len(prompts) - 1, given.questions).astype(int))
    prompts = [prompts[i] for i in chosen]
    ask = Ask(max_tokens=given.max_tokens, ends=target.eos_token_ids)
    peers = [
        create_peer(
            spec, given.model, dtype="float32", threads=1, python=given.python, batch=max(BATCHES),
            max_context=CONTEXT, decode=tokenizer.decode,
        )
        for spec in SPECS
    ]  # fmt: skip
    try:
        for peer in peers:
            peer.open()
            for batch in BATCHES:  # the first rounds compile
                peer.answer([prompt[:16] * 2 for prompt in prompts[:batch]], ask)
            peer.forget()
        ran = ask_all(peers, prompts, ask, given.minutes)
    finally:
        for peer in peers:
            peer.close()
    for (spec, batch), one in ran.items():
        print(f"{spec}, batch {batch}: {one.line(ran[SPECS[0], batch])}")
    verdicts = Greedy(Reference.load(given.model, dtype="float32", device=target.device), None, target.eos_token_ids)
    for one in ran.values():
        for number, (prompt, answer) in enumerate(zip(prompts, one.answers, strict=False)):
            verdicts.read(number, prompt, answer, SamplingParams(max_tokens=given.max_tokens), "")
    print(f"against the model alone: {verdicts.tokens:,} tokens, {len(verdicts.divergences)} differ, "
          f"{len(verdicts.bugs)} of them bugs")  # fmt: skip
    plain = ran[SPECS[0], 1].answers
    alone = replayed(
        "sam,draft=16", tokenizer, target.eos_token_ids, target.vocab_size, prompts[: len(plain)], plain, chains=True
    )
    print(f"sam replayed as chains: {alone:.3f} tokens a round")


def ask_all(
    peers: Sequence[Contestant], prompts: Sequence[list[int]], ask: Ask, minutes: float
) -> dict[tuple[str, int], Ran]:
    """All engines answer a part of the questions, one at a time and eight at a time, then the next part."""
    ran = {(spec, batch): Ran() for spec in SPECS for batch in BATCHES}
    until = monotonic() + 60 * minutes
    for first in range(0, len(prompts), PART):
        part = prompts[first : first + PART]
        for batch in BATCHES:
            for spec, peer in zip(SPECS, peers, strict=True):
                for asked in [part] if batch > 1 else [[prompt] for prompt in part]:
                    replies = peer.answer(asked, ask)
                    ran[spec, batch].replies += replies
                    ran[spec, batch].seconds += replies[0].seconds
        if monotonic() > until:
            break
    return ran


if __name__ == "__main__":
    main()
