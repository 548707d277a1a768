"""The plug-in for vLLM's second runner, without vLLM: rows by request, in slots that are used again; its worker.

tests/plugins/test_vllm_slow.py has vLLM itself."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import MethodError
from paceline.plugins import vllm, vllm_v2
from paceline.plugins.vllm_v2 import Speculator
from tests.plugins import test_vllm

LIMIT, VOCAB, K = test_vllm.LIMIT, test_vllm.VOCAB, 4
CPU = torch.device("cpu")


def config(is_async=False, method="ngram", v2=True, **options):
    given = test_vllm.config(**options)
    given.scheduler_config = SimpleNamespace(async_scheduling=is_async)
    given.speculative_config.method = method
    given.use_v2_model_runner = v2
    return given


@dataclass
class InputBatch:
    req_ids: list[str]
    num_reqs: int
    idx_mapping: torch.Tensor
    idx_mapping_np: Any
    is_prefilling_np: Any


class States:
    def __init__(self, slots=3):
        self.all_token_ids = SimpleNamespace(gpu=torch.full((slots, LIMIT), 9, dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(slots, dtype=torch.int32))
        self.req_id_to_index = {}


@dataclass
class DraftTokenIds:
    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclass
class Request:
    """prefill: tokens to compute before the first is sampled; computed: those that are, or were in the prefix cache."""

    text: list[int]
    prefill: int
    computed: int
    draft: list[int] = field(default_factory=list)


class Host:
    """vLLM's second runner and its scheduler: prompts in chunks, rows in slots, texts that follow a rule."""

    def __init__(self, speculator, padded=False, most=K):
        self.speculator, self.states, self.padded, self.most = speculator, speculator.states, padded, most
        self.requests = {}
        self.free = [0, 1, 2]
        self.accepted = self.drafted = 0
        self.batch = []

    def join(self, key, text, computed=0):
        slot = self.free.pop()
        self.states.req_id_to_index[key] = slot
        self.states.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text)
        self.states.total_len.gpu[slot] = len(text)
        self.requests[key] = Request(text, len(text), computed)

    def leave(self, key):
        self.free.append(self.states.req_id_to_index.pop(key))
        return self.requests.pop(key).text

    def step(self, *without):
        keys = sorted(set(self.requests) - set(without), key=lambda key: (not self.requests[key].draft, key))
        self.batch, prefilling, counts = [], [], []
        for key in keys:
            request, new = self.requests[key], []
            prefilling.append(request.computed < request.prefill)
            if prefilling[-1]:
                request.computed += 3
            if request.computed >= request.prefill:
                new = test_vllm.verified(request.text, request.draft)
            self.accepted += max(len(new) - 1, 0)
            self.drafted += len(request.draft)
            slot, length = self.states.req_id_to_index[key], len(request.text)
            self.states.all_token_ids.gpu[slot, length : length + len(new)] = torch.tensor(new, dtype=torch.int32)
            self.states.total_len.gpu[slot] += len(new)
            request.text += new
            self.batch.append((key, new))
            counts.append(len(new))
        slots = np.array([self.states.req_id_to_index[key] for key in keys], np.intp)
        batch = InputBatch(keys, len(keys), torch.from_numpy(slots).long(), slots, np.array(prefilling))
        sampled, nothing = torch.tensor(counts, dtype=torch.int32), torch.zeros(3)
        drafts = self.speculator.propose(
            batch, None, None, nothing, None, sampled, nothing, nothing, nothing, nothing, nothing,
            num_speculative_tokens=self.most, dp_sync_state=None, mm_inputs=None,
        )  # fmt: skip
        assert drafts.shape == (len(keys), K)
        assert drafts.dtype == torch.int64
        assert ((drafts >= 0) & (drafts < VOCAB)).all()
        taken = self.speculator.shorten(DraftTokenIds(keys, [[-1] * self.most for _ in keys]))
        assert taken.req_ids == keys
        for key, row, ids in zip(keys, drafts.tolist(), taken.draft_token_ids, strict=True):
            request = self.requests[key]
            request.draft = row if self.padded else row[: len(ids)]
            if n := self.speculator.lengths.get(key, 0):
                assert row[n:] == row[n - 1 : n] * (K - n)
            if request.computed < request.prefill:
                assert not ids
                request.draft = []
            elif self.padded:
                request.draft = row[: max(LIMIT - 1 - len(request.text), 0)]  # vLLM's scheduler stops there


def speculator(spec="sam", **more):
    return Speculator(config(**more), CPU, States(), spec)


@pytest.mark.parametrize("spec", ["sam", "suffix", "hierarchy"])
def test_drafts_are_those_of_the_first_runner(spec):
    """Prompts in chunks and from the prefix cache, a row that waits, one that is preempted, slots used again."""
    host = Host(speculator(spec))
    reference = vllm.Proposer(config(), spec)
    tokens = np.full((3, LIMIT), 7, np.int32)

    def step(*without):
        host.step(*without)
        lengths = np.zeros(3, np.int32)
        for i, (key, _) in enumerate(host.batch):
            text = host.requests[key].text
            lengths[i], tokens[i, : len(text)] = len(text), text
        expected = reference.propose([new for _, new in host.batch], lengths, tokens)
        assert [host.requests[key].draft for key, _ in host.batch] == expected
        for key, row in host.speculator.rows.items():
            if key in host.requests:
                assert row.tokens.tolist() == host.requests[key].text

    host.join("a", [1, 20, 30, 1, 20, 30, 1])
    step()
    host.join("b", [2, 21, 31, 2, 21, 31, 2, 21], computed=5)  # five tokens of the prompt are in the prefix cache
    for _ in range(4):
        step()
    host.join("c", [3, 22, 32, 3, 22])
    step()
    step("b")  # it is not scheduled in this step
    step()
    ids = {key: row.id for key, row in host.speculator.rows.items()}
    text = host.leave("a")  # preempted
    step()
    assert "a" not in host.speculator.rows
    host.join("a", text, computed=4)
    for _ in range(7):
        step()
    assert host.speculator.rows["b"].id == ids["b"], "it has stayed"
    assert host.speculator.rows["a"].id != ids["a"], "it has begun again"
    host.leave("b")
    host.join("d", [5, 6, 7, 8, 5, 6, 7])  # in the slot of b
    for _ in range(5):
        step()
    assert host.accepted > 0.5 * host.drafted > 10


def test_steps_that_run_a_prompt_are_no_rounds(monkeypatch):
    host, told = Host(speculator()), []
    monkeypatch.setattr(host.speculator.history, "disturbed", lambda: told.append(len(host.requests)))
    host.join("a", [1, 20, 30, 1, 20, 30, 1])  # in three pieces
    for _ in range(5):
        host.step()
    host.join("b", [2, 21, 31, 2])  # in two
    for _ in range(4):
        host.step()
    assert told == [1, 1, 1, 2, 2]


def test_what_has_left_is_forgotten_and_can_be_read_later():
    host = Host(speculator("sam,past=1000"))
    prompt = [1, 20, 30, 4, 5, 36, 7]
    host.join("a", list(prompt))
    for _ in range(8):
        host.step()
    host.leave("a")
    host.join("b", list(prompt))
    for _ in range(3):
        host.step()
    assert list(host.speculator.rows) == ["b"]
    [automata] = [part._automata for part in host.speculator.history.drafter.parts]
    assert (len(automata), len(host.requests["b"].draft)) == (1, K)
    host.step()
    assert host.accepted >= K, "b goes on as a did"


def test_a_request_whose_text_is_replaced_begins_again():
    host = Host(speculator())
    host.join("a", [1, 2, 3, 1, 2])
    for _ in range(4):
        host.step()
    host.leave("a")
    host.join("a", [8, 9, 8, 9, 8, 9, 8, 9, 8, 9, 8, 9])  # within a step, as vLLM does it with streamed prompts
    host.step()
    assert not host.speculator.rows
    for _ in range(4):
        host.step()
    assert host.speculator.rows["a"].tokens.tolist() == host.requests["a"].text
    row = host.speculator.rows["a"]
    seen, host.speculator = host.speculator, speculator()  # vLLM does not ask ours after this step
    host.speculator.states, host.speculator.failures, host.requests["a"].draft = host.states, vllm.FAILURES, []
    host.step()
    host.speculator = seen
    host.step()
    assert seen.rows["a"] is row, "it goes on"
    assert row.tokens.tolist() == host.requests["a"].text


def test_asynchronous_scheduling_verifies_padded_drafts():
    drafts = speculator(is_async=True)
    given = config(is_async=True, draft="sam")
    del given.additional_config["paceline"]["paced"]
    assert not Speculator(given, CPU, States()).paced
    given.scheduler_config.async_scheduling = False
    assert Speculator(given, CPU, States()).paced
    host = Host(drafts, padded=True)
    host.join("a", [1, 20, 30, 1, 20])
    host.join("b", [11, 11, 11, 11])  # padding repeats the last token, and is right here
    while max(len(request.text) for request in host.requests.values()) < LIMIT - 8:
        host.step()
        for key, row in drafts.rows.items():
            assert row.tokens.tolist() == host.requests[key].text
    assert host.accepted > 10


def test_fewer_tokens_when_vllm_wants_fewer_and_none_in_a_dummy_run():
    host = Host(speculator(), most=2)
    host.join("a", [1, 20, 30, 1, 20, 30])
    for host.most in (2, K, 2):  # it may change from step to step
        longest = 0
        for _ in range(4):
            host.step()
            longest = max(longest, host.speculator.lengths.get("a", 0))
        assert longest == host.most
    assert host.drafted
    rows = dict(host.speculator.rows)
    batch = SimpleNamespace(num_reqs=2, req_ids=["x", "y"])
    names = ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled", "seeds")
    drafts = host.speculator.propose(input_batch=batch, **dict.fromkeys(names), dummy_run=True, is_profile=True)
    assert (drafts.tolist(), host.speculator.rows) == ([[0] * K] * 2, rows)


class BaseSpeculator(ABC):
    def init_cudagraph_manager(self, cudagraph_mode):
        raise NotImplementedError

    @abstractmethod
    def propose(self, input_batch, num_sampled, dummy_run, num_speculative_tokens): ...


class CPUWorker:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.first_stage = False

    def init_device(self):
        ngrams = None if self.first_stage else object()
        self.model_runner = SimpleNamespace(speculator=ngrams, device=CPU, req_states=States())

    def take_draft_token_ids(self):
        return DraftTokenIds(["a"], [[-1] * K])

    def compile_or_warm_up_model(self):
        return "times"


@pytest.fixture
def host_modules(monkeypatch):
    """vLLM's modules, as far as the worker asks for them."""
    found = {}
    for name, content in {
        "vllm": {"__version__": "0.40.0"}, "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
        "vllm.v1.worker.gpu.input_batch": {"InputBatch": InputBatch},
        "vllm.v1.worker.gpu.spec_decode.speculator": {"BaseSpeculator": BaseSpeculator},
    }.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(content)
        monkeypatch.setitem(sys.modules, name, found[name])
    vllm_v2._worker.cache_clear()
    yield found
    vllm_v2._worker.cache_clear()


@pytest.mark.usefixtures("host_modules")
def test_a_worker_of_the_platform_with_our_speculator():
    assert vllm_v2.sam__prompt_lookup is vllm_v2.sam__prompt_lookup
    worker = vllm_v2.sam__prompt_lookup(config())
    assert isinstance(worker, CPUWorker)
    worker.init_device()
    first = worker.model_runner.speculator
    assert isinstance(first, BaseSpeculator)
    assert (first.spec, first.states) == ("sam+prompt-lookup", worker.model_runner.req_states)
    first.lengths = {"a": 2}
    assert worker.take_draft_token_ids().draft_token_ids == [[-1, -1]]
    assert worker.compile_or_warm_up_model() == "times"
    assert worker.model_runner.speculator is not first, "what vLLM warmed up with is forgotten"
    named = vllm_v2.Worker(config(draft="suffix"))
    named.init_device()
    assert named.model_runner.speculator.spec == "suffix"
    stage = vllm_v2.sam(config())
    stage.first_stage = True
    stage.init_device()
    assert stage.model_runner.speculator is None
    assert stage.take_draft_token_ids().draft_token_ids == [[-1] * K]


def test_what_cannot_work_is_refused_when_vllm_starts(host_modules, monkeypatch):
    def refused(words, **more):
        with pytest.raises(MethodError, match=words) as caught:
            vllm_v2.Worker(config(**more)).init_device()
        assert "\n" not in str(caught.value)

    refused("Which drafter")
    refused("asks the target for", draft="recycling")
    refused("second model runner, and this engine uses the first", v2=False, draft="sam")
    refused("has the method 'custom_class': use", method="custom_class", draft="sam")
    with pytest.raises(AttributeError):
        vllm_v2._nothing  # noqa: B018
    monkeypatch.setattr(States, "__init__", lambda self: None)
    refused("vLLM 0.40.0 has others .RequestState without all_token_ids; .*: use one of those", draft="sam")
    monkeypatch.undo()


def test_an_interface_that_has_changed_is_refused(host_modules):
    class Later(BaseSpeculator):
        @abstractmethod
        def prepare(self): ...

    vars(host_modules["vllm.v1.worker.gpu.spec_decode.speculator"])["BaseSpeculator"] = Later
    with pytest.raises(MethodError, match="new prepare"):
        vllm_v2.sam(config()).init_device()
    del vars(host_modules["vllm.v1.worker.gpu.spec_decode.speculator"])["BaseSpeculator"]
    with pytest.raises(MethodError, match="cannot import name"):
        vllm_v2.sam(config()).init_device()
    vars(host_modules["vllm.platforms"])["current_platform"].device_type = "npu"
    with pytest.raises(MethodError, match="this vLLM runs on npu"):
        vllm_v2.suffix  # noqa: B018
