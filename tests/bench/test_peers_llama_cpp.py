"""llama.cpp as a peer, with a small stand-in for llama_cpp."""

import sys
import types

import numpy as np
import pytest
from tests.bench.peers import asked, check, opened, peer

from paceline.errors import ModelError
from paceline.peers import NotInstalled


class FakeLlama:
    """The loop of llama_cpp.Llama.generate over a rule for the next token: previous + 1, and 5 after 8."""

    def __init__(self, model_path, n_ctx, draft_model=None, **words):
        if "broken" in model_path:
            raise ValueError("Failed to load model from file")
        self.draft_model, self.words, self.n_threads = draft_model, words | {"n_ctx": n_ctx}, words["n_threads"] or 2
        self.metadata = {"general.file_type": "7"}
        self.seeds = []
        self.n_tokens, self.input_ids = 0, np.zeros(n_ctx, np.intc)

    def set_seed(self, seed):
        self.seeds.append(seed)

    def reset(self):
        self.n_tokens = 0

    def close(self):
        self.words = {}

    def eval(self, tokens):
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def generate(self, tokens, reset, **sampling):
        assert self.n_tokens == 0  # or a part of the prompt would be had for nothing
        self.sampling, tokens, at = sampling, list(tokens), len(tokens) - 1
        while True:
            self.eval(tokens)
            while at < self.n_tokens:
                token = 5 if self.input_ids[at] == 8 else int(self.input_ids[at]) + 1
                at += 1
                yield token
                tokens = [token]
                if at < self.n_tokens and token != self.input_ids[at]:
                    self.n_tokens = at
                    break
            if self.draft_model is not None:
                self.input_ids[self.n_tokens] = token
                tokens += self.draft_model(self.input_ids[: self.n_tokens + 1]).tolist()


class FakeLookup:
    """Always proposes the same two tokens behind a 5."""

    def __init__(self, max_ngram_size, num_pred_tokens):
        self.words = (max_ngram_size, num_pred_tokens)

    def __call__(self, ids):
        return np.array([6, 9] if ids[-1] == 5 else [], np.intc)


@pytest.fixture
def llama_cpp(monkeypatch):
    module, speculative = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_speculative")
    vars(module).update(__version__="0.3", Llama=FakeLlama, llama_supports_gpu_offload=lambda: False)
    vars(speculative).update(LlamaPromptLookupDecoding=FakeLookup)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    return module


def test_llama_cpp_answers(llama_cpp, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with opened(f"llama-cpp:{file}", tmp_path, threads=3) as one:
        for _ in range(2):
            (turn,) = asked(one, [[4, 6]], max_tokens=6)
            assert (turn.tokens, turn.lengths, turn.nodes) == ([7, 8, 5, 6, 7, 8], [1] * 6, [0] * 6)
            check(turn)
        assert (one.llama.sampling["temp"], one.facts["threads"]) == (0.0, 3)
        assert (one.slots, one.target_bytes) == (1, 4)
        (turn,) = asked(one, [[4, 6]], max_tokens=9, ends=(8,), temperature=0.7, seeds=(5,))
        assert (turn.tokens, turn.finish_reason, one.llama.seeds) == ([7, 8], "stop", [5])
    with opened(f"llama-cpp-lookup:{file}", tmp_path) as one:
        (turn,) = asked(one, [[4, 7]], max_tokens=9)
        assert turn.tokens == [8, 5, 6, 7, 8, 5, 6, 7, 8]
        assert (turn.lengths, turn.nodes) == ([1, 1, 2, 1, 1, 2, 1], [0, 0, 2, 0, 0, 2, 0])
        check(turn)
        assert (one.llama.draft_model.words, one.facts["num_pred_tokens"]) == ((2, 2), 2)
    vars(llama_cpp)["llama_supports_gpu_offload"] = lambda: True
    with opened(f"llama-cpp-lookup:{file}", tmp_path) as one:  # the target is on the processor, and so is this
        assert one.llama.words["n_gpu_layers"] == 0
    with opened(f"llama-cpp-lookup:{file}", tmp_path, device="cuda") as one:
        assert (one.llama.draft_model.words, one.llama.words["n_gpu_layers"]) == ((2, 10), -1)


def test_llama_cpp_that_is_not_there(llama_cpp, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="there is no file"):
        peer("llama-cpp:none.gguf", tmp_path).open()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot load .*broken.gguf: Failed to load"):
        peer(f"llama-cpp:{broken}", tmp_path).open()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NotInstalled, match="llama-cpp-python is not installed: pip install llama-cpp-python"):
        peer("llama-cpp:none.gguf", tmp_path).open()
