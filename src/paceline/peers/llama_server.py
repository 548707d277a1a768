"""Runs llama.cpp's server of the wheel xllamacpp until it is ended, for xllamacpp.py, with another interpreter."""

import argparse
import signal
import sys

sys.path.pop(0)  # Modules of this folder have engines' names, so it must not be on the path.
import xllamacpp


def params_of(asked: argparse.Namespace) -> "xllamacpp.CommonParams":
    """One slot, no cache of prompts, on the CPU."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port = asked.model, asked.port
    params.n_ctx, params.n_parallel, params.n_gpu_layers = asked.context, 1, 0
    params.cache_prompt, params.cache_ram_mib = False, 0
    if asked.threads is not None:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    if asked.spec != "none":
        name = f"COMMON_SPECULATIVE_TYPE_{asked.spec.upper().replace('-', '_')}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    if asked.spec == "ngram-cache" and asked.file:
        params.speculative.ngram_cache.lookup_cache_static = asked.file
    if asked.spec.startswith("draft-"):
        draft = params.speculative.draft
        draft.mparams.path, draft.n_gpu_layers = asked.file or draft.mparams.path, 0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = params.cpuparams.n_threads
        draft.n_max = asked.k or draft.n_max
    return params


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--spec", default="none")
    parser.add_argument("--file")
    for name in ("context", "port", "threads", "k"):
        parser.add_argument(f"--{name}", type=int)
    server = xllamacpp.Server(params_of(parser.parse_args()))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
