"""In PYTHONPATH: vLLM has its second model runner on a CPU, with its kernels in Triton's interpreter, in every process.

vLLM 0.32 refuses that runner unless Triton has a backend for CPUs, and no wheel of Triton has one. The interpreter runs
the same kernels in Python, tens of milliseconds each, and needs no backend; vLLM is told that there is one."""

import os
import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def _has_a_backend(triton):
    triton.backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))


def _samples_by_torch(sampler):
    sampler.HAS_TRITON = False  # this kernel's loop is more than the interpreter takes; torch does it, too


CHANGED = {"triton.backends": _has_a_backend, "vllm.v1.sample.ops.topk_topp_sampler": _samples_by_torch}


class Changing:
    """Changes a module when it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name in CHANGED else None
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), CHANGED[name](module))[0]
        return spec


sys.meta_path.insert(0, Changing)
