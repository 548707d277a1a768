"""llama.cpp's matrix products, called in its own libraries: for benchmarks/quantised.py --ggml FOLDER.

FOLDER holds libggml.so, libggml-cpu.so and libggml-base.so, as a build of llama.cpp leaves them in build/bin. The
products of a step are one graph, as in llama.cpp; weights that it rearranges are in its rearranging buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch

from paceline.target.quantised.blocks import Q4_0, Q4_K, Blocks

BF16, F32 = 30, 0
REARRANGED = (Q4_0, Q4_K)
"""On x86."""


class _Init(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool)]


class Library:
    """ggml in a folder, with a number of threads."""

    def __init__(self, folder: Path, threads: int):
        self._all = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu", "ggml")
        ]
        self.backend = self.call("ggml_backend_cpu_init", c_void_p)
        self.call("ggml_backend_cpu_set_n_threads", None, c_void_p(self.backend), c_int(threads))
        self.plain = self.call("ggml_backend_cpu_buffer_type", c_void_p)
        registry = c_void_p(self.call("ggml_backend_cpu_reg", c_void_p))
        device = c_void_p(self.call("ggml_backend_reg_dev_get", c_void_p, registry, c_size_t(0)))
        name = c_char_p(b"ggml_backend_dev_get_extra_bufts")
        others = self.call("ggml_backend_reg_get_proc_address", c_void_p, registry, name)
        listed = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(others)(device)
        self.extra = []
        while listed[len(self.extra)]:
            self.extra.append(listed[len(self.extra)])

    def call(self, name: str, returns: object, *values: object) -> Any:
        """A function of the library."""
        function = next(getattr(library, name) for library in self._all if hasattr(library, name))
        function.restype = returns
        return function(*values)

    def context(self) -> c_void_p:
        """Room for the descriptions of tensors."""
        return c_void_p(self.call("ggml_init", c_void_p, _Init(1 << 22, None, True)))

    def rearranging(self) -> int:
        """The buffer that rearranges weights."""
        for kind in self.extra:
            if b"REPACK" in self.call("ggml_backend_buft_name", c_char_p, c_void_p(kind)):
                return kind
        raise RuntimeError("this build of ggml does not rearrange weights")


class Products:
    """x @ weight.T for every weight, of rows that are float32."""

    def __init__(self, library: Library, weights: Sequence[Blocks | torch.Tensor]):
        self.library, self._weights = library, []
        for weight in weights:
            blocks = isinstance(weight, Blocks)
            kind = weight.kind.number if isinstance(weight, Blocks) else BF16
            context = library.context()
            tensor = _tensor(library, context, kind, weight.shape[1], weight.shape[0])
            rearranged = blocks and weight.kind in REARRANGED  # type: ignore[union-attr]
            buffer = c_void_p(library.rearranging() if rearranged else library.plain)
            library.call("ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, context, buffer)
            data = weight.data.contiguous() if isinstance(weight, Blocks) else weight.contiguous()
            at = c_void_p(data.data_ptr())
            library.call("ggml_backend_tensor_set", None, tensor, at, c_size_t(0), c_size_t(data.nbytes))
            self._weights.append((tensor, weight.shape[1]))
        self._graphs: dict[int, c_void_p] = {}

    def __call__(self, rows: int) -> None:
        """All products with `rows` rows."""
        if rows not in self._graphs:
            self._graphs[rows] = self._graph(rows)
        self.library.call("ggml_backend_graph_compute", c_int, c_void_p(self.library.backend), self._graphs[rows])

    def _graph(self, rows: int) -> c_void_p:
        library, context = self.library, self.library.context()
        x = {width: _tensor(library, context, F32, width, rows) for width in {width for _, width in self._weights}}
        graph = c_void_p(library.call("ggml_new_graph", c_void_p, context))
        for tensor, width in self._weights:
            out = c_void_p(library.call("ggml_mul_mat", c_void_p, context, tensor, x[width]))
            library.call("ggml_build_forward_expand", None, graph, out)
        library.call("ggml_backend_alloc_ctx_tensors", c_void_p, context, c_void_p(library.backend))
        for width, tensor in x.items():
            numbers = torch.randn(rows, width)
            at = c_void_p(numbers.data_ptr())
            library.call("ggml_backend_tensor_set", None, tensor, at, c_size_t(0), c_size_t(numbers.nbytes))
        return graph


def _tensor(library: Library, context: c_void_p, kind: int, width: int, outputs: int) -> c_void_p:
    made = library.call("ggml_new_tensor_2d", c_void_p, context, c_int(kind), c_int64(width), c_int64(outputs))
    return c_void_p(made)
