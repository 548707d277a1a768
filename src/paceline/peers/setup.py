"""The setting that all peers of a run share, and the common form of their answers."""

import copy
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError, PromptError, meant
from paceline.folders import cache_folder
from paceline.formats.experts import as_state
from paceline.formats.place import gguf_of, is_gguf
from paceline.formats.precision import DTYPES
from paceline.formats.shape import TILED, Shape
from paceline.formats.tokenizer import Tokenizer
from paceline.kernels.blocks import Blocks
from paceline.net.completion import Completion
from paceline.target.load import find, read_config

FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
"""Of a hub repository: all that an engine reads."""


@dataclass(frozen=True)
class Setup:
    """One model, one machine.

    model        a folder, a hub id or a GGUF file; dtype float32, bfloat16 or float16, the target's own.
    threads      processor threads; None: the engine's choice.
    python       the interpreter of another environment, for peers that need one.
    batch        most prompts answered together.
    max_context  tokens of prompt and answer that the model's context holds.
    tokenizer    None: token ids are the text. ends: the model's end tokens.
    device       a device word of torch; the target's own, so that nobody has a GPU that others have not."""

    model: str
    dtype: str
    threads: int | None
    python: str | None
    batch: int
    max_context: int
    tokenizer: Tokenizer | None
    ends: Sequence[int] = ()
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise PacelineError(
                f"a peer's dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.{meant(self.dtype, DTYPES)}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def folder(self) -> Path:
        """A folder with the model's configuration and weights, those of a GGUF file expanded to `dtype`."""
        return expanded(gguf_of(self.model), self.torch_dtype) if is_gguf(self.model) else folder_of(self.model)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, without special tokens; not timed."""
        return str(tokens) if self.tokenizer is None else self.tokenizer.decode(tokens)

    def max_new(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Most new tokens after `prompt`; PromptError if its context has no room for any."""
        if not 0 < len(prompt) < self.max_context:
            raise PromptError(
                f"The prompt has {len(prompt)} tokens; this model's context holds {self.max_context} with the answer."
            )
        return min(params.max_tokens, self.max_context - len(prompt))

    def turn(
        self, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, *, lengths: Sequence[int],
        times: Sequence[float], nodes: Sequence[int], depths: Sequence[int] | None = None, **more: Any,
    ) -> Completion:  # fmt: skip
        """An answer, cut to what was asked for, with the rounds that brought it. depths: `nodes` where drafts are
        chains; more: further fields of the Completion."""
        own = cut(tokens, params.stop_token_ids, self.max_new(prompt, params))
        if own and own[-1] in params.stop_token_ids:
            finish = "stop"
        else:
            finish = "context" if len(prompt) + params.max_tokens > self.max_context else "length"
        kept = cut_rounds(lengths, len(own))
        of_rounds = {"times": times, "nodes": nodes, "depths": nodes if depths is None else depths}
        more |= {name: list(values[: len(kept)]) for name, values in of_rounds.items()}
        more |= {"speculation": {"num_rounds": len(kept), "num_draft_tokens": sum(more["nodes"])}}
        usage = {"prompt_tokens": len(prompt)}
        return Completion(self.decode(own), finish_reason=finish, tokens=own, usage=usage, lengths=kept, **more)


class Rounds:
    """Rounds of one call as they are heard: when their tokens came, how many, and over how many their forward ran."""

    def __init__(self, began: float):
        self.began = began
        self.times: list[float] = []
        self.lengths: list[int] = []
        self.widths: list[int] = []

    def facts(self, prompt: int) -> dict[str, Any]:
        """Arguments of `Setup.turn` about the rounds. prompt: tokens of the prompt, padding included, which the first
        forward ran with the first draft."""
        known = [prompt, *[1] * len(self.widths)]
        nodes = [width - ran for width, ran in zip(self.widths, known, strict=False)]
        return {"lengths": self.lengths, "times": self.times, "nodes": nodes}


def cut(tokens: Sequence[int], ends: Collection[int], limit: int | None = None) -> list[int]:
    """At most `limit` tokens, up to and including the first end."""
    tokens = tokens[:limit]
    return list(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))])


def cut_rounds(lengths: Sequence[int], total: int) -> list[int]:
    """The first rounds that bring `total` tokens, the last of them shortened if need be."""
    first, left = [], total
    for length in lengths:
        if left <= 0:
            break
        first.append(min(length, left))
        left -= length
    return first


def expanded(file: Path, dtype: torch.dtype) -> Path:
    """A folder in the user's cache with the weights of a GGUF file in `dtype`, made the first time, for engines that
    read no such files. They are the weights that `load(file, dtype=dtype)` computes with."""
    from paceline.formats.gguf import config_of, untiled, weights_of
    from paceline.formats.gguf_file import GGUF

    status = file.stat()
    folder = cache_folder() / "expanded" / f"{file.stem}-{str(dtype)[6:]}-{status.st_size}-{int(status.st_mtime)}"
    if not (folder / "config.json").exists():
        opened = GGUF(file)
        config = config_of(opened)
        weights = {
            name: weight.dense(dtype) if isinstance(weight, Blocks) else weight.to(dtype)
            for name, weight in weights_of(opened, config).items()
        }
        delta = Shape.of(config).delta
        if delta is not None and delta.tiled:
            weights = {name: untiled(name, weight, delta) for name, weight in weights.items()}
            setattr(config, TILED, False)
        with torch.device("meta"):
            state = AutoModelForCausalLM.from_config(copy.deepcopy(config)).state_dict()
        weights = as_state(weights, {name: tensor.shape for name, tensor in state.items()})
        weights = {name: weight.contiguous() for name, weight in weights.items()}
        config.architectures, config.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]], dtype
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as beside:
            whole = Path(beside, "whole")
            config.save_pretrained(whole)
            save_file(weights, whole / "model.safetensors", {"format": "pt"})
            try:
                os.rename(whole, folder)
            except OSError:
                if not (folder / "config.json").exists():  # Another process may have been first.
                    raise PacelineError(f"{folder} is not whole and in the way: delete it") from None
    return folder


def folder_of(model: str | Path) -> Path:
    """The folder with a model's configuration and weights, from the hub if need be; ModelError if there is none."""
    return find(model, FILES).resolve()


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that a forward reads: all of them, the input embedding only where it is the head as well.

    Counted on a model without storage."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    count = sum(weight.numel() for weight in model.parameters() if tied or weight is not embedding)
    return int(count * torch.empty(0, dtype=dtype).element_size())


def model_bytes(model: str, dtype: torch.dtype) -> int:
    """`weight_bytes` of a model by name."""
    return weight_bytes(read_config(folder_of(model)), dtype)
