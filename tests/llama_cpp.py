"""llama.cpp of the wheel xllamacpp as a judge, in an environment of its own, which PACELINE_XLLAMACPP_PYTHON names."""

import json
import os
import subprocess

import pytest

SERVER = """
import json, sys, urllib.request, xllamacpp
path, drafted, route, requests = json.loads(sys.stdin.read())
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers, params.port = path, 128, 1, 0, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_prompt, params.cache_ram_mib = False, 0
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if drafted:
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
    params.speculative.draft.n_max, params.speculative.draft.p_min = drafted, 0.0
server = xllamacpp.Server(params)
url, typed = server.listening_address + route, {"Content-Type": "application/json"}
asked = [urllib.request.Request(url, json.dumps(one).encode(), typed) for one in requests]
print("SAID", json.dumps([json.load(urllib.request.urlopen(one)) for one in asked]))
"""


def answers(file, route, requests, drafted=0):
    """What its server says to requests, all in float32. drafted: tokens a round of the head in the file."""
    python = os.environ.get("PACELINE_XLLAMACPP_PYTHON")
    if not python:
        pytest.skip("set PACELINE_XLLAMACPP_PYTHON to the interpreter of an environment with xllamacpp")
    given = json.dumps([str(file), drafted, route, requests])
    done = subprocess.run([python, "-c", SERVER], input=given, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert said, done.stderr[-2000:]
    found = json.loads(said[0].removeprefix("SAID "))
    return found
