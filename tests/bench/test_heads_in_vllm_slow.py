"""Heads of ours in vLLM: it loads them, writes what our engine writes, and accepts as many of their tokens, place by
place. Set PACELINE_VLLM_PYTHON to the interpreter of an environment with vLLM, then

    pytest -m slow tests/bench/test_heads_in_vllm_slow.py
"""

import json
import os

import numpy as np
import pytest
from tests.bench.peers import asked

from paceline.bench.suites import read_suite
from paceline.core.sampling import SamplingParams
from paceline.draft.registry import names
from paceline.engine.engine import Engine
from paceline.peers import create_peer
from paceline.train.export import export_medusa

NEW = 64


def by_place(lengths, drafted):
    """Of all rounds with a draft, how often the draft was accepted up to each place at least, [drafted]."""
    rounds = [length - 1 for answer in lengths for length in answer[1:-1]]  # the prompt's, and one cut by the budget
    return np.array([np.mean([accepted >= place for accepted in rounds]) for place in range(1, drafted + 1)])


def drafters(method, demo, scratch):
    """A chain of a head of ours for our engine, the folder that vLLM reads, and the length of its drafts."""
    folder = demo.with_name(f"{demo.name}-{method}")
    if method not in names() or not folder.is_dir():
        pytest.skip(f"there is no {folder.name}")
    if method == "eagle3":
        return f"eagle3:{folder},tree=0,draft=3,stop=fixed", folder, 3
    export_medusa(folder, demo, scratch / "heads")
    heads = json.loads((scratch / "heads" / "config.json").read_text())["num_heads"]
    paths = scratch / "chain.txt"
    paths.write_text(" ".join("0" * depth for depth in range(1, heads + 1)))
    return f"medusa:{folder},tree={paths}", scratch / "heads", heads


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_vllm_accepts_as_much_of_a_head_as_our_engine(method, demo, tmp_path):
    python = os.environ.get("PACELINE_VLLM_PYTHON")
    if not python:
        pytest.skip("set PACELINE_VLLM_PYTHON to the interpreter of an environment with vLLM")
    spec, folder, drafted = drafters(method, demo, tmp_path)
    engine = Engine(demo, spec, dtype="float32", max_batch=1)
    assert engine.tokenizer is not None
    texts = [one.turns[0] for one in read_suite("demo").questions][:24]
    prompts = [engine.encode([{"role": "user", "content": text}]).tolist() for text in texts]
    ours = []
    answers = []
    for prompt in prompts:
        row = engine.add(prompt, SamplingParams(max_tokens=NEW))
        ours.append([])
        while engine.has_work:
            ours[-1] += [len(delta.tokens) for delta in engine.step() if delta.tokens]
        answers.append(row.tokens[len(prompt) :].tolist())
    peer = create_peer(
        f"vllm-head:{folder},k={drafted},eager=true", str(demo), dtype="float32",
        threads=int(os.environ.get("OMP_NUM_THREADS", "1")), python=python, batch=1, max_context=1024,
        tokenizer=engine.tokenizer,
    )
    try:
        peer.open()
        how = {"max_tokens": NEW, "ends": engine.target.eos_token_ids}
        turns = [asked(peer, [prompt], **how)[0] for prompt in prompts]
    finally:
        peer.close()
    assert [turn.tokens for turn in turns] == answers
    here, there = (by_place(rows, drafted) for rows in (ours, [list(turn.lengths or []) for turn in turns]))
    rounds = sum(len(lengths) - 2 for lengths in ours)
    print(f"\n{method}: accepted up to each place, ours {here}, vLLM {there}, {rounds} rounds")
    # In float32 a near-tie of a draft may fall the other way: one round in fifty.
    assert np.abs(here - there).max() < 0.02
    assert here[0] > 0.1
