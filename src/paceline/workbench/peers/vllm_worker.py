"""The vLLM side of the peer: answers lines of JSON with lines of JSON. Run by vllm.py with another interpreter.

    {"model": ..., "dtype": ..., ...}           ->  {"ready": {versions, device, threads, ...}}, or {"missing": why}
    {"prompts": [[1, 2]], "rooms": [64], ...}   ->  {"answers": [{"tokens", "lengths", "times", ...}], "seconds": ...}
    {"forget": true}, {"wake": seconds}         ->  {"done": true}

Imports nothing of Paceline: it runs where only vLLM is installed. Answers go to what was standard output when it
started; whatever vLLM and its children print there goes to standard error instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

# A script's folder comes first in its search path, and in this one a module is called vllm.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != _HERE]


def main() -> None:
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = map(json.loads, sys.stdin)
    try:
        engine = Engine(next(requests))
    except ImportError as error:
        return _send(answers, {"missing": _one_line(error)})
    except Exception as error:
        return _send(answers, {"error": _one_line(error)})
    _send(answers, {"ready": engine.facts()})
    for request in requests:
        try:
            _send(answers, engine.do(request))
        except Exception as error:
            _send(answers, {"error": _one_line(error)})


def _die_with_parent() -> None:
    """Whoever asks stops this process between two answers, and it could not see then that nobody will ask any more."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


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
        """What it runs on and with."""
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

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Whatever is asked for."""
        if "forget" in request:
            return self.forget()
        return self.wake(request["wake"]) if "wake" in request else self.answer(request)

    def wake(self, seconds: float) -> dict[str, Any]:
        """Be busy for so long. A drafter that learns sees the same few tokens every time."""
        from vllm import SamplingParams

        wish = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        began = perf_counter()
        while perf_counter() - began < seconds:
            self.llm.generate([{"prompt_token_ids": [1]}], [wish], use_tqdm=False)
        return {"done": True}

    def forget(self) -> dict[str, Any]:
        """A drafter as new: suffix decoding keeps the answers it has seen."""
        self.llm.collective_rpc(_new_drafter)
        return {"done": True}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        seeds = request["seeds"] or [None] * len(request["prompts"])
        wishes = [
            SamplingParams(
                temperature=request["temperature"],
                top_k=request.get("top_k", 0),
                top_p=request.get("top_p", 1.0),
                repetition_penalty=request.get("repetition_penalty", 1.0),
                max_tokens=room,
                seed=seed,
                stop_token_ids=request["ends"],
                ignore_eos=True,  # the ends that count are all in stop_token_ids
                detokenize=False,
            )
            for room, seed in zip(request["rooms"], seeds)  # noqa: B905
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        self.heard.clear()
        peak = Peak(self.cpu)
        began = perf_counter()
        outputs = self.llm.generate(prompts, wishes, use_tqdm=False)
        seconds = perf_counter() - began
        return {
            "answers": [self._told(output, began) for output in outputs],
            "seconds": seconds,
            "peak_bytes": peak.read(),
        }

    def _told(self, output: Any, began: float) -> dict[str, Any]:
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
    runner.drafter = type(runner.drafter)(runner.vllm_config)


class Peak:
    """Most memory of this process (on a GPU: of its tensors there) from now on; None where nobody tells."""

    def __init__(self, cpu: bool):
        self.cpu = cpu
        if not cpu:
            import torch

            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.cpu = False

    def read(self) -> int | None:
        if self.cpu:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
