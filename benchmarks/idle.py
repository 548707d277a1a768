"""What idle vLLMs cost whoever answers meanwhile, and what stopping them between answers saves (`paceline bench` does).

    python benchmarks/idle.py models/demo --peer-python build/vllm/bin/python --peers 3

Plain decoding answers beside vLLMs that wait for a question and beside the same ones stopped, in turn. Linux.
"""

from __future__ import annotations

import argparse
import signal
import time
from statistics import median

from paceline.bench.ours import Ours
from paceline.target.load import load, load_tokenizer
from paceline.workbench.contestant import Ask
from paceline.workbench.peers import create_peer
from paceline.workbench.peers.vllm import Plain

PROMPT = [*range(100, 140)]
SETTLE = 0.3
"""Seconds that plain decoding is kept busy before it is timed."""


def main() -> None:
    """Time plain decoding in turn beside idle and beside stopped engines, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    wish = parser.parse_args()
    target, tokenizer = load(wish.model), load_tokenizer(wish.model)
    plain, peers = Ours("none", target, tokenizer, batch=1), [vllm(wish, tokenizer.decode) for _ in range(wish.peers)]
    plain.open()
    try:
        for peer in peers:
            peer.open()
            peer.answer([PROMPT], Ask(16))
        times: dict[str, list[float]] = {"idle": [], "stopped": []}
        for turn in range(wish.turns):
            for state in sorted(times, reverse=bool(turn % 2)):
                put(peers, state)
                plain.wake(SETTLE)
                [told] = plain.answer([PROMPT], Ask(wish.tokens))
                times[state].append(told.seconds)
    finally:
        for peer in peers:
            peer.close()
    for state, seconds in times.items():
        print(f"{wish.peers} vLLMs {state}: {1e3 * median(seconds):.1f} ms for {wish.tokens} tokens")


def vllm(wish: argparse.Namespace, decode: object) -> Plain:
    peer = create_peer(
        "vllm", wish.model, dtype="bfloat16", threads=None, python=wish.peer_python, batch=1, max_context=1024,
        decode=decode,  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(peer, Plain)
    return peer


def put(peers: list[Plain], state: str) -> None:
    for peer in peers:
        assert peer.worker is not None
        peer.worker.process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGCONT)
    time.sleep(0.05)


if __name__ == "__main__":
    main()
