"""Our drafters in vLLM: the same answers as plain vLLM, and as many tokens a round as the drafter replayed?

    python benchmarks/vllm_plugin.py models/demo QUESTIONS.jsonl --python ENV/bin/python --questions 8

QUESTIONS.jsonl has Spec-Bench's form; first turns, spread over the file, greedy, float32, in batches of 1 and of 8.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.bench.contestant import Ask
from paceline.bench.peers import create_peer
from paceline.certify import acceptance
from paceline.engine import Engine

PEERS = ("vllm,eager=true", "vllm-paceline,eager=true,draft=sam", "vllm-ngram,eager=true")
CONTEXT = 1024


def main() -> None:
    """A line for every peer and batch size, then the replay of our drafter over plain vLLM's answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("questions_file", type=Path)
    parser.add_argument("--python", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    engine = Engine(given.model, dtype="float32")
    assert engine.tokenizer is not None
    target, tokenizer = engine.target, engine.tokenizer
    asked = [json.loads(line)["turns"][0] for line in given.questions_file.read_text("utf-8").splitlines()]
    asked = asked[:: len(asked) // given.questions][: given.questions]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
    prompts = [prompt for prompt in prompts if len(prompt) + given.max_tokens < CONTEXT]
    ask = Ask(max_tokens=given.max_tokens, ends=target.eos_token_ids)
    plain: dict[int, list[list[int]]] = {}
    for spec in PEERS:
        peer = create_peer(
            spec, given.model, dtype="float32", threads=1, python=given.python, batch=8, max_context=CONTEXT,
            decode=tokenizer.decode,
        )  # fmt: skip
        try:
            peer.open()
            for batch in (1, 8):
                parts = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
                replies = [reply for part in parts for reply in peer.answer(part, ask)]
                said = [reply.tokens for reply in replies]
                same = sum(a == b for a, b in zip(plain.setdefault(batch, said), said, strict=True))
                rate = acceptance.measured([reply.lengths or [] for reply in replies])
                print(f"{spec}, batch {batch}: {rate:.3f} tokens a round, {same} of {len(said)} answers plain vLLM's")
        finally:
            peer.close()
    replayed = acceptance.reference(
        "sam,draft=16", tokenizer, target.eos_token_ids, target.vocab_size, prompts, plain[1], chains=True
    )
    print(f"sam replayed as chains: {replayed:.3f} tokens a round")


if __name__ == "__main__":
    main()
