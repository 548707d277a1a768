"""Drafters for vLLM's second model runner, by name.

    LLM(model, worker_cls="paceline.plugins.vllm_v2.sam",
        speculative_config={"method": "ngram", "num_speculative_tokens": 16})

    LLM(model, worker_cls="paceline.plugins.vllm_v2.Worker",
        speculative_config={"method": "ngram", "num_speculative_tokens": 16},
        additional_config={"paceline": {"draft": "suffix,corpus=build/answers"}})

That runner builds the speculators it knows and refuses classes of others. `worker_cls` is vLLM's own option for another
worker: ours is the platform's, and puts a speculator of ours into the place of the one for n-grams. Nothing in vLLM is
patched. It hands vLLM token ids without probabilities, as n-grams do, and vLLM verifies them. Written for vLLM 0.32;
0.33 has the same interface. One that has changed is refused when vLLM starts."""

import functools
import importlib
import inspect
from typing import Any

import numpy as np
import torch

from paceline.errors import MethodError
from paceline.plugins.vllm import Drafts, Step, spec_of

FIRST = 'leave worker_cls out, and use speculative_config={"model": "paceline.plugins.vllm.sam", ...}'
WORKERS = {"cuda": "gpu_worker.Worker", "cpu": "cpu_worker.CPUWorker", "xpu": "xpu_worker.XPUWorker"}
"""vLLM's worker for each type of device; ROCm's type is "cuda"."""

USED = {
    "InputBatch": {"req_ids", "num_reqs", "idx_mapping", "idx_mapping_np", "is_prefilling_np"},
    "BaseSpeculator.propose": {"input_batch", "num_sampled", "dummy_run", "num_speculative_tokens"},
    "RequestState": {"all_token_ids", "total_len", "req_id_to_index"},
}
"""What this file reads of vLLM's classes."""


class Speculator(Drafts):
    """What vLLM's second runner asks for drafts, with ids of requests as keys.

    states  the runner's `RequestState`: the text of each request is there in whole, with the part of the prompt that
            was found in the prefix cache.

    With asynchronous scheduling vLLM verifies as many tokens after every row as it is configured for: shorter drafts
    are padded, and they are not paced."""

    supports_mm_inputs = False
    draft_logits = None  # drafts have no distribution: each token was certain

    def __init__(self, vllm_config: Any, device: torch.device, states: Any, spec: str | None = None):
        synchronous = not vllm_config.scheduler_config.async_scheduling
        super().__init__(vllm_config, spec, synchronous, 'worker_cls="paceline.plugins.vllm_v2.sam"')
        self.device, self.states = device, states
        self.lengths: dict[str, int] = {}

    def init_cudagraph_manager(self, cudagraph_mode: Any = None) -> None:
        """Nothing to do: a drafter runs no graphs."""

    capture = init_cudagraph_manager

    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Any, aux_hidden_states: Any,
        num_sampled: torch.Tensor, *rest: Any, dummy_run: bool = False, num_speculative_tokens: int | None = None,
        **more: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Drafts of all rows, int64 [rows, K] on the device, each padded with its last token.

        num_sampled             int [rows], tokens that each row gained in this step; 0 inside a prompt.
        num_speculative_tokens  how many vLLM will verify now, at most K; None: K."""
        drafts = np.zeros((input_batch.num_reqs, self.most), np.int64)
        if not dummy_run:
            most = self.most if num_speculative_tokens is None else num_speculative_tokens
            chains = self.chains(lambda: self._read(input_batch, num_sampled, most))
            self.lengths = {key: len(chain) for key, chain in chains.items()}
            for i, key in enumerate(input_batch.req_ids):
                if len(chain := chains.get(key, drafts[i, :0])):
                    drafts[i] = np.pad(chain, (0, self.most - len(chain)), mode="edge")
        return torch.from_numpy(drafts).to(self.device)

    def shorten(self, taken: Any) -> Any:
        """vLLM's `DraftTokenIds`, without padding: a synchronous scheduler then verifies no more than was drafted."""
        rows = zip(taken.req_ids, taken.draft_token_ids, strict=True)
        return type(taken)(taken.req_ids, [tokens[: self.lengths.get(key, 0)] for key, tokens in rows])

    def _read(self, batch: Any, num_sampled: torch.Tensor, most: int) -> Step:
        texts, slots = self.states.all_token_ids.gpu, batch.idx_mapping
        lengths = self.states.total_len.gpu[slots]
        last = lengths[:, None] + torch.arange(-1 - self.most, 0, device=slots.device)  # No step adds more tokens.
        recent = texts[slots[:, None], last.clamp(0, texts.shape[1] - 1)]
        # One copy from the device.
        seen = torch.cat([num_sampled[:, None], lengths[:, None], recent], 1).cpu().numpy().astype(np.int64)
        gone = [self.rows.pop(key) for key in list(self.rows) if key not in self.states.req_id_to_index]
        step = Step({}, {}, gone, bool(batch.is_prefilling_np.any()))
        for i, key in enumerate(batch.req_ids):
            count, length = map(int, seen[i, :2])
            row = self.rows.get(key)
            if row is not None and (batch.is_prefilling_np[i] or not count <= length - len(row) <= recent.shape[1]):
                step.gone.append(self.rows.pop(key))  # The row was preempted, or its text was replaced.
            if not count:
                continue
            if key in self.rows:
                step.gained[key] = seen[i, len(self.rows[key]) - length :]  # More than `count` if a step was unseen.
            else:
                step.new[key] = texts[int(batch.idx_mapping_np[i]), :length].cpu().numpy().astype(np.int64)
        self.history.most = most
        for row in self.rows.values():
            row.most = most
        return step


class Drafting:
    """Mixed into a worker of vLLM: drafts with `spec`, or with what `additional_config` names."""

    spec: str | None = None
    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        _check(self.vllm_config)
        super().init_device()  # type: ignore[misc]
        self.new_speculator()

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.new_speculator()  # vLLM warms up with requests of its own, which are nothing to learn from
        return done

    def new_speculator(self) -> None:
        """A new drafter for the runner, which has seen nothing."""
        runner = self.model_runner
        if runner.speculator is not None:  # Only the last stage of a pipeline has one.
            runner.speculator = _create(self.vllm_config, runner.device, runner.req_states, self.spec)

    def take_draft_token_ids(self) -> Any:
        taken, speculator = super().take_draft_token_ids(), self.model_runner.speculator  # type: ignore[misc]
        return taken if taken is None or speculator is None else speculator.shorten(taken)


@functools.cache
def _worker(spec: str | None) -> type:
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device not in WORKERS:
        raise MethodError(f"paceline.plugins.vllm_v2 drafts on {', '.join(WORKERS)}, and this vLLM runs on {device}")
    module, name = WORKERS[device].split(".")
    base = getattr(importlib.import_module(f"vllm.v1.worker.{module}"), name)
    return type("Worker", (Drafting, base), {"spec": spec})


def __getattr__(name: str) -> Any:
    return _worker(None if name == "Worker" else spec_of(name))


def _check(config: Any) -> None:
    """MethodError if this engine runs the first runner, or was not told to draft n-grams."""
    if not getattr(config, "use_v2_model_runner", True):
        raise MethodError(
            "paceline.plugins.vllm_v2 is for vLLM's second model runner, and this engine uses the first, for want of "
            f"Triton or because of VLLM_USE_V2_MODEL_RUNNER=0 or another option: {FIRST}"
        )
    speculative = config.speculative_config
    if speculative is None or speculative.method not in ("ngram", "ngram_gpu"):
        raise MethodError(
            "paceline.plugins.vllm_v2 drafts in the place of vLLM's n-grams, and speculative_config "
            f"{'is missing' if speculative is None else f'has the method {speculative.method!r}'}: use "
            '{"method": "ngram", "num_speculative_tokens": 16}'
        )


def _create(config: Any, device: torch.device, states: Any, spec: str | None) -> Any:
    """A `Speculator` that is a `BaseSpeculator` of vLLM. MethodError for a vLLM with another interface."""
    try:
        from vllm.v1.worker.gpu.input_batch import InputBatch
        from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

        has = {
            "InputBatch": set(inspect.signature(InputBatch).parameters),
            "BaseSpeculator.propose": set(inspect.signature(BaseSpeculator.propose).parameters),
            "RequestState": {name for name in dir(states) if not name.startswith("_")},
        }
        changed = [f"{kind} without {name}" for kind, names in USED.items() for name in sorted(names - has[kind])]
        changed += [f"new {name}" for name in sorted(BaseSpeculator.__abstractmethods__ - set(dir(Speculator)))]
    except (ImportError, AttributeError) as error:
        changed = [str(error)]
    if changed:
        import vllm

        raise MethodError(
            f"paceline.plugins.vllm_v2 knows the speculators of vLLM 0.32 and 0.33, and vLLM {vllm.__version__} has "
            f"others ({'; '.join(changed)}): use one of those, or where this one has its first model runner, {FIRST}"
        )
    return type("PacelineSpeculator", (Speculator, BaseSpeculator), {})(config, device, states, spec)
