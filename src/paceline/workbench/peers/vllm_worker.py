"""The vLLM side of the peer: answers lines of JSON with lines of JSON. Run by vllm.py with another interpreter.

    {"model": ..., "dtype": ..., ...}           ->  {"ready": {versions, device, threads, ...}}, or {"missing": why}
    {"prompts": [[1, 2]], "limits": [64], ...}   ->  {"answers": [{"tokens", "lengths", "times", ...}], "seconds": ...}
    {"forget": true}, {"wake": seconds}         ->  {"done": true}
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

from worker_loop import Peak, serve


class Engine:
    """An LLM in this process, and ears on its rounds."""

    def __init__(self, config: dict[str, Any]):
        import torch

        self.config, self.cpu = config, not torch.cuda.is_available()
        # In this process: no hand-over between processes in every round, and its rounds can be heard.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if self.cpu:
            # The default binds a thread to a core each and keeps a core free; OMP_NUM_THREADS says how many here.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            memory = {"kv_cache_memory_bytes": config["kv_bytes"]}
        else:
            free, total = torch.cuda.mem_get_info()
            memory = {"gpu_memory_utilization": 0.9 * free / total}  # the other contestants have a share already

        from vllm import LLM

        drafting = config["speculative"]
        if drafting is not None:
            memory |= {"speculative_config": drafting, "per_request_spec_decode_metrics": "detailed"}
        self.llm = LLM(
            config["model"],
            dtype=config["dtype"],
            max_model_len=config["max_context"],
            max_num_seqs=config["batch"],
            enforce_eager=config["eager"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            generation_config="vllm",
            seed=0,
            additional_config=config.get("additional", {}),
            worker_cls=config.get("worker", "auto"),
            **memory,
        )
        self.heard: list[tuple[float, str, int]] = []
        self._listen()

    def _listen(self) -> None:
        """Note time, request and number of tokens of every row of every round."""
        core = self.llm.llm_engine.engine_core
        get, heard = core.get_output, self.heard

        def get_output() -> Any:
            outputs = get()
            now = perf_counter()
            heard.extend((now, one.request_id, len(one.new_token_ids)) for one in outputs.outputs if one.new_token_ids)
            return outputs

        core.get_output = get_output

    def facts(self) -> dict[str, Any]:
        import torch
        import transformers
        import vllm
        from vllm.triton_utils import HAS_TRITON

        return {
            "engine": f"vllm {vllm.__version__}",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": "cpu" if self.cpu else torch.cuda.get_device_name(),
            "threads": torch.get_num_threads(),
            "compiled": not self.config["eager"],
            "triton": bool(HAS_TRITON),
        }

    def nudge(self) -> None:
        """A short answer. A drafter that learns sees the same few tokens every time."""
        from vllm import SamplingParams

        wish = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        self.llm.generate([{"prompt_token_ids": [1]}], [wish], use_tqdm=False)

    def forget(self) -> None:
        """A drafter as new: suffix decoding keeps the answers it has seen."""
        self.llm.collective_rpc(_new_drafter)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        seeds = request["seeds"] or [None] * len(request["prompts"])
        wishes = [
            SamplingParams(
                **{name: request[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")},
                max_tokens=limit,
                seed=seed,
                stop_token_ids=request["ends"],
                ignore_eos=True,  # the ends that count are all in stop_token_ids
                detokenize=False,
            )
            for limit, seed in zip(request["limits"], seeds)  # noqa: B905
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        self.heard.clear()
        peak = Peak(None if self.cpu else "cuda")
        began = perf_counter()
        outputs = self.llm.generate(prompts, wishes, use_tqdm=False)
        seconds = perf_counter() - began
        return {
            "answers": [self._answer(output, began) for output in outputs],
            "seconds": seconds,
            "peak_bytes": peak.read(),
        }

    def _answer(self, output: Any, began: float) -> dict[str, Any]:
        one = output.outputs[0]
        # Inside the engine an id ends in something random.
        mine = [
            (now - began, count)
            for now, request, count in self.heard
            if request == output.request_id or request.startswith(output.request_id + "-")
        ]
        steps = getattr(one, "spec_decode_metrics", None)
        return {
            "tokens": list(one.token_ids),
            "lengths": [count for _, count in mine],
            "times": [when for when, _ in mine],
            "accepted": list(steps.per_step_accepted) if steps else [],
            "drafted": list(steps.per_step_drafted) if steps else [],
        }


def _new_drafter(worker: Any) -> None:
    runner = worker.model_runner
    if hasattr(runner, "drafter"):
        runner.drafter = type(runner.drafter)(runner.vllm_config)
    else:
        worker.new_speculator()  # of paceline.plugins.vllm_v2


if __name__ == "__main__":
    serve(Engine)
