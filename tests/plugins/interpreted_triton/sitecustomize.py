"""Runs a script whose vLLM has its second model runner on a CPU, with its kernels in Triton's interpreter.

    PYTHON interpreted_triton.py SCRIPT [ARGUMENT ...]

vLLM 0.32 refuses that runner unless Triton has a backend for CPUs, and no wheel of Triton has one. The interpreter runs
the same kernels in Python, tens of milliseconds each, and needs no backend; vLLM is told that there is one."""

import os
import runpy
import sys
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

from triton.backends import backends

backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))

if __name__ == "__main__":
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # this kernel's loop is more than the interpreter takes; torch does it, too
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
