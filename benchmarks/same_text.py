"""Where our greedy text and others' part, and how close the two tokens are there.

    python benchmarks/same_text.py smollm2                                  # llama.cpp, on the same file
    python benchmarks/same_text.py smollm2 --dtype float32 --against auto/16 auto-float32/8 bfloat16
    python benchmarks/same_text.py model.gguf --against peer:transformers --peer-python ENV/bin/python

All answer ten prompts with one token a forward, to the same token ids; auto/16 is dtype auto with activations of 16
bits. The last line for each has its tokens a second, prompts included. Engines round in different ways, so two tokens
whose logits are nearly equal can swap, and then all that follows is another text: that is no fault of either. A line
says at which new token a prompt's answers part, both tokens, and how far apart their logits are for us. Where the gap
is large, one of the two computes something else. The exit status is 1 if a gap is above --tie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import zip_longest
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.bench.suites import read_suite
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.base import Target
from paceline.target.folder import gguf_of, is_gguf
from paceline.target.load import load
from paceline.workbench.contestant import PEER, Ask, NotInstalled
from paceline.workbench.peers import create_peer

Answer = Callable[[list[int]], list[int]]
"""From a prompt's token ids to the answer's."""


def plainly(target: Target, max_tokens: int) -> Answer:
    """Our own plain decoding."""
    engine = Engine(target, max_batch=1, reuse=False)
    return lambda prompt: engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0].tokens


def loaded(model: str, word: str) -> Target:
    """A target of ours, by its dtype or DTYPE/BITS of activations."""
    dtype, _, bits = word.partition("/")
    return load(model, dtype=dtype, device="cpu", activations=int(bits) if bits else None)


def by_peer(asked: Any, against: str, model: str, target: Target) -> Answer:
    """A peer's plain decoding; NotInstalled if it is not there."""
    assert target.tokenizer is not None
    spec = against.removeprefix(PEER)
    if "llamacpp" in spec.replace("-", "") and ":" not in spec and is_gguf(model):
        spec = f"{spec}:{gguf_of(model)}"
    peer = create_peer(
        spec,
        model,
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        python=asked.peer_python,
        batch=1,
        max_context=min(target.max_context, 2048),
        decode=target.tokenizer.decode,
    )
    peer.open()
    ask = Ask(asked.max_tokens, ends=tuple(target.eos_token_ids))
    return lambda prompt: peer.answer([prompt], ask)[0].tokens


def next_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """Logits of the token after `tokens`."""
    slot = target.add_row(len(tokens) + 1)
    ids = np.array(tokens, np.int64)
    logits = target.verify([Segment(slot, ids, np.arange(-1, len(ids) - 1), num_logits=1)]).logits[-1].float()
    target.drop_row(slot)
    return logits


def main() -> int:
    """Answer the prompts with all engines, and print where they part; 1 if anywhere by more than a tie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what `paceline generate` takes")
    parser.add_argument("--against", nargs="+", default=["peer:llama-cpp"], help="dtypes of ours, or peer:NAME")
    parser.add_argument("--dtype", default="auto", help="ours, or DTYPE/BITS")
    parser.add_argument("--suite", default="demo", help="as for `paceline bench`")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tie", type=float, default=0.5, help="a gap of logits above this is no near-tie")
    parser.add_argument("--peer-python", help="the interpreter of the environment that has the peer")
    asked = parser.parse_args()
    target = loaded(asked.model, asked.dtype)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise PacelineError(f"{asked.model} has no tokenizer")
    questions = read_suite(asked.suite, limit=asked.prompts).questions
    chats = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    prompts = {question.id: tokenizer.encode_chat(chat) for question, chat in zip(questions, chats, strict=True)}
    own, speed = answered(plainly(target, asked.max_tokens), prompts)
    print(f"ours: {asked.model}, {asked.dtype}; at most {asked.max_tokens} tokens, greedy; {speed:.1f} tokens/s")
    status = 0
    for against in asked.against:
        if against.startswith(PEER):
            theirs = by_peer(asked, against, asked.model, target)
        else:
            theirs = plainly(loaded(asked.model, against), asked.max_tokens)
        others, speed = answered(theirs, prompts)
        same, far = compared(target, prompts, own, others, asked.tie)
        far_away = f"{far} part where there is no near-tie"
        print(f"{against}: {same} of {len(prompts)} the same; {far_away}; {speed:.1f} tokens/s", flush=True)
        status = status or int(far > 0)
    return status


def answered(answer: Answer, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], float]:
    """Answers by question, and tokens a second."""
    answer(next(iter(prompts.values())))  # compiled and warm
    began = perf_counter()
    answers = {name: answer(prompt) for name, prompt in prompts.items()}
    return answers, sum(map(len, answers.values())) / (perf_counter() - began)


def compared(
    target: Target, prompts: dict[str, list[int]], own: dict[str, list[int]], others: dict[str, list[int]], tie: float
) -> tuple[int, int]:
    """How many answers are the same, and how many part where there is no near-tie; a line for each that differs."""
    assert target.tokenizer is not None
    same = far = 0
    for name, prompt in prompts.items():
        one, other = own[name], others[name]
        at = next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
        if at is None:
            same += 1
            continue
        if at >= min(len(one), len(other)):
            far += 1
            print(f"{name}: one ends at token {at}, the other goes on")
            continue
        logits = next_logits(target, [*prompt, *one[:at]])
        gap = float(logits[one[at]] - logits[other[at]])
        far += gap > tie
        tokens = " and ".join(repr(target.tokenizer.decode([answer[at]])) for answer in (one, other))
        verdict = ": no near-tie" if gap > tie else ""
        print(f"{name}: {at} tokens alike, then {tokens}, whose logits are {gap:.3f} apart{verdict}")
    return same, far


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotInstalled as error:
        print(f"{error}. Or compare with another dtype: --against bfloat16")
        sys.exit(2)
    except PacelineError as error:
        sys.exit(f"error: {error}")
