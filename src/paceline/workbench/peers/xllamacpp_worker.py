"""xllamacpp's side of the peer: llama.cpp's server, asked over HTTP. Run by xllamacpp.py with another interpreter.

    {"model": FILE, "max_context": ..., "threads": ..., "spec": ..., ...}  ->  {"ready": {versions, threads, ...}}
    {"prompt": [1, 2], "limit": 64, ...}                               ->  {"tokens", "rounds", "seconds", ...}
    {"forget": true}, {"wake": seconds}                                ->  {"done": true}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import perf_counter
from typing import Any
from urllib.request import Request, urlopen

from worker_loop import Peak, serve


class Engine:
    """A server with one slot, without a cache of prompts."""

    def __init__(self, config: dict[str, Any]):
        import xllamacpp

        self.config, self.module = config, xllamacpp
        self.forget()

    def forget(self) -> None:
        """A server that has answered nothing; the one before ends."""
        params = self.module.CommonParams()
        params.model.path = self.config["model"]
        params.n_ctx, params.n_parallel = self.config["max_context"], 1
        params.cache_prompt, params.cache_ram_mib = False, 0
        params.n_gpu_layers = 0
        if self.config["threads"] is not None:
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.config["threads"]
        if self.config["spec"] != "none":
            name = f"COMMON_SPECULATIVE_TYPE_{self.config['spec'].upper().replace('-', '_')}"
            params.speculative.types = [getattr(self.module.common_speculative_type, name)]
        if self.config["spec"] == "ngram-cache" and self.config["file"]:
            params.speculative.ngram_cache.lookup_cache_static = self.config["file"]
        if self.config["spec"].startswith("draft-"):
            draft = params.speculative.draft
            draft.mparams.path, draft.n_gpu_layers = self.config["file"], 0
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = params.cpuparams.n_threads
            draft.n_max = self.config["k"] or draft.n_max
        self.params = params
        self.server: Any = None  # the one before has ended before the next one reads its weights
        self.server = self.module.Server(params)

    def facts(self) -> dict[str, Any]:
        return {
            "engine": f"xllamacpp {self.module.__version__}",
            "threads": self.params.cpuparams.n_threads,
            "system": self.module.get_system_info(),
        }

    def nudge(self) -> None:
        list(self.events({"prompt": [1], "n_predict": 2, "cache_prompt": False}))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        peak = Peak()
        asked = {
            "prompt": request["prompt"],
            "n_predict": request["limit"],
            "temperature": request["temperature"],
            "seed": request["seed"],
            # What is asked for and no more: what the server adds by default is off.
            "samplers": ["penalties", "top_k", "top_p", "temperature"],
            "top_k": request["top_k"],
            "top_p": request["top_p"],
            "repeat_penalty": request["repetition_penalty"],
            "cache_prompt": False,
            "return_tokens": True,
            "timings_per_token": True,
        }
        tokens: list[int] = []
        events = []
        began = perf_counter()
        for event in self.events(asked):
            timings = event.get("timings") or {}
            new = event.get("tokens") or []
            if new and not event.get("stop"):
                tokens += new
                drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
                events.append((perf_counter() - began, len(new), drafted, accepted))
        seconds = perf_counter() - began
        return {"tokens": tokens, "events": events, "seconds": seconds, "peak_bytes": peak.read()}

    def events(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a completion, as they come."""
        body = json.dumps(asked | {"stream": True}).encode()
        request = Request(f"{self.server.listening_address}/completion", body, {"Content-Type": "application/json"})
        with urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"].get("message", event["error"]))
                    yield event


if __name__ == "__main__":
    serve(Engine)
