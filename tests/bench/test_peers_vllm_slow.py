"""vLLM as a peer on the demo model. Set PACELINE_VLLM_PYTHON to the interpreter of an environment with vLLM, then

    pytest -m slow tests/bench/test_peers_vllm_slow.py
"""

import os
from time import perf_counter

import pytest
from tests.bench.peers import asked

from paceline.bench.suites import read_suite
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.peers import create_peer

NEW = 16
PLAIN = "vllm,eager=true"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", [PLAIN, "vllm-ngram,eager=true", "vllm-draft:{demo},k=3"])
def test_vllm_as_a_peer_says_what_the_engine_says(spec, demo):
    python = os.environ.get("PACELINE_VLLM_PYTHON")
    if not python:
        pytest.skip("set PACELINE_VLLM_PYTHON to the interpreter of an environment with vLLM")
    engine = Engine(demo, dtype="float32")
    assert engine.tokenizer is not None
    ends = engine.target.eos_token_ids
    texts = [one.turns[0] for one in read_suite("demo").questions[:2]]
    texts.append("Repeat after me: one two three one two three one two three.")
    prompts = [engine.encode([{"role": "user", "content": text}]).tolist() for text in texts]
    ours = [one.tokens for one in engine.generate(prompts, SamplingParams(max_tokens=NEW))]
    peer = create_peer(
        spec.format(demo=demo), str(demo), dtype="float32", threads=1, python=python, batch=2, max_context=1024,
        tokenizer=engine.tokenizer,
    )
    try:
        peer.open()
        began = perf_counter()
        peer.wake(0.3)
        assert 0.3 < perf_counter() - began < 10
        how = {"max_tokens": NEW, "ends": ends}
        turns = [asked(peer, [prompt], **how)[0] for prompt in prompts]
        if "ngram" in spec:  # a new drafter does as well; suffix decoding gets one between repetitions
            peer.forget()
        again = asked(peer, prompts[:2], **how)
        if peer.facts["device"] == "cpu" and spec != PLAIN and not peer.facts["triton"]:
            with pytest.raises(PacelineError, match="cannot sample here"):
                asked(peer, prompts[:1], max_tokens=NEW, temperature=1.0, ends=ends)
    finally:
        peer.close()
    assert ([turn.tokens for turn in turns], [turn.tokens for turn in again]) == (ours, ours[:2])
    for turn in turns + again:
        assert (sum(turn.lengths), turn.times) == (len(turn.tokens), sorted(turn.times))
        assert turn.times[-1] <= turn.seconds
        assert (turn.nodes, turn.peak_bytes) == (None, None)  # a server tells neither
    for turn in turns:  # its counters tell the drafts of all rounds
        assert bool(turn.batch) == (spec != PLAIN)
        assert turn.batch.get("accepted", 0) >= len(turn.tokens) - len(turn.lengths)
    if "draft" in spec:  # the model is its own draft model
        assert turns[0].lengths == [1, 4, 4, 4, 3]
