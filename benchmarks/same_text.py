"""Where our greedy text and another engine's part, and how close the two tokens are there.

    python benchmarks/same_text.py smollm2                                  # llama.cpp, on the same file
    python benchmarks/same_text.py smollm2 --dtype bfloat16 --against float32
    python benchmarks/same_text.py model.gguf --against peer:transformers --peer-python ENV/bin/python

Both answer ten prompts with one token a forward, to the same token ids. Engines round in different ways, so two tokens
whose logits are nearly equal can swap, and then all that follows is another text: that is no fault of either. A line
says at which new token a prompt's answers part, both tokens, and how far apart their logits are for us. Where the gap
is large, one of the two computes something else. The exit status is 1 if a gap is above --tie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from paceline.bench.suites import read_suite
from paceline.engine.engine import Engine
from paceline.engine.round import Segment
from paceline.engine.sampling import SamplingParams
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


def by_peer(asked: Any, model: str, target: Target) -> Answer:
    """A peer's plain decoding; NotInstalled if it is not there."""
    assert target.tokenizer is not None
    spec = asked.against.removeprefix(PEER)
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
    """Answer the prompts with both engines, and print where they part; 1 if anywhere by more than a tie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what `paceline generate` takes")
    parser.add_argument("--against", default="peer:llama-cpp", help="a dtype of ours, or peer:NAME")
    parser.add_argument("--dtype", default="auto", help="ours")
    parser.add_argument("--suite", default="demo", help="as for `paceline bench`")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tie", type=float, default=0.5, help="a gap of logits above this is no near-tie")
    parser.add_argument("--peer-python", help="the interpreter of the environment that has the peer")
    asked = parser.parse_args()
    target = load(asked.model, dtype=asked.dtype, device="cpu")
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise PacelineError(f"{asked.model} has no tokenizer")
    ours = plainly(target, asked.max_tokens)
    if asked.against.startswith(PEER):
        theirs = by_peer(asked, asked.model, target)
    else:
        theirs = plainly(load(asked.model, dtype=asked.against, device="cpu"), asked.max_tokens)
    same = far = 0
    print(f"ours: {asked.model}, {asked.dtype}; theirs: {asked.against}; at most {asked.max_tokens} tokens, greedy")
    for question in read_suite(asked.suite, limit=asked.prompts).questions:
        prompt = tokenizer.encode_chat([{"role": "user", "content": question.turns[0]}])
        one, other = ours(prompt), theirs(prompt)
        at = next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
        if at is None:
            same += 1
            print(f"{question.id}: the same {len(one)} tokens")
            continue
        if at >= min(len(one), len(other)):
            far += 1
            print(f"{question.id}: one ends at token {at}, the other goes on")
            continue
        logits = next_logits(target, [*prompt, *one[:at]])
        gap = float(logits[one[at]] - logits[other[at]])
        far += gap > asked.tie
        tokens = " and ".join(repr(tokenizer.decode([answer[at]])) for answer in (one, other))
        verdict = ": no near-tie" if gap > asked.tie else ""
        print(f"{question.id}: {at} tokens alike, then {tokens}, whose logits are {gap:.3f} apart{verdict}")
    print(f"{same} of {asked.prompts} the same; {far} part where there is no near-tie")
    return 1 if far else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotInstalled as error:
        print(f"{error}. Or compare with another dtype: --against bfloat16")
        sys.exit(2)
    except PacelineError as error:
        sys.exit(f"error: {error}")
