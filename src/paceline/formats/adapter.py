"""LoRA adapters: folders with changes to a model's matrices, which are merged into the model when it is loaded.

Hu et al. 2021 (arXiv 2106.09685), in the layout of the package peft: adapter_config.json names the base, which is the
model to change, and adapter_model.safetensors has two thin matrices A and B for each changed matrix W. The merged
weight is W + alpha / r B A, so the model takes no more time than its base. "Lossless" refers to the merged weights.

    adapter = Adapter.of("build/noisy")     # None: no adapter, but a whole model
    weights = adapter.merged(weights)       # the argument: weights of the model adapter.base"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from paceline.errors import ModelError
from paceline.formats.checks import check_config, check_shapes, unsupported
from paceline.formats.folder import open_file, read_config, read_json, untied
from paceline.formats.place import SMALL_FILES, find, name_of
from paceline.formats.shape import Shape, weight_shapes
from paceline.kernels.blocks import Q8_0, Blocks, Weights, WeightsByName, quantise

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge it into its base model first, with peft's merge_and_unload"
NOT_READ = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "kasa_config", "arrow_config", "monteclora_config",
)  # fmt: skip
"""Entries that change what an adapter computes. Adapters are refused unless these are absent, null, false or empty."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What `init_lora_weights` begins with if peft also changes the base model's own weights."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PART = re.compile(r"(.+)\.(?:lora_[AB]|base_layer)\.weight")


@dataclass(frozen=True)
class Adapter:
    """The adapter in a folder.

    base    the model that it changes, as `load` takes it: a folder, a GGUF file, or a name.
    config  its adapter_config.json.

    Beside an adapter of a model's first layers is a config.json of these layers: the sorted drafts of `train s2d`."""

    folder: Path
    base: str
    config: dict[str, Any]

    @classmethod
    def of(cls, model: str | Path) -> Adapter | None:
        """Read the adapter that `model` names, a folder or a name on the hub; None if it is a whole model.

        ModelError if there is no such model, or for an adapter that cannot be merged."""
        folder = find(model, [*SMALL_FILES, "*.safetensors"])
        if not (folder / CONFIG).exists() or any(folder.glob("model*.safetensors*")):
            return None
        config = read_json(folder / CONFIG)
        if (kind := config.get("peft_type")) != "LORA":
            raise ModelError(f"{folder} holds an adapter of type {kind}, and only LORA is read here: {MERGE}")
        unread = [key for key in NOT_READ if config.get(key)] + ["bias"] * (config.get("bias", "none") != "none")
        if unread:
            raise ModelError(f"{folder / CONFIG} has {unread[0]}, which is not read here: {MERGE}")
        start = str(config.get("init_lora_weights")).lower()
        if start.startswith(CHANGES_BASE):
            raise ModelError(f"{folder}: its training changed its base model, too (init_lora_weights {start}): {MERGE}")
        base = config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ModelError(f"{folder / CONFIG} names no base model (base_model_name_or_path): add its folder or name")
        beside = folder / base
        return cls(folder, str(beside.resolve()) if beside.exists() else base, config)

    @property
    def name(self) -> str:
        return name_of(self.folder)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors, by the base's names of their modules."""
        if not (self.folder / WEIGHTS).exists():
            raise ModelError(f"{self.folder} has no {WEIGHTS}, and only that is read: save it with a newer peft")
        opened = open_file(self.folder / WEIGHTS)
        return {key.removeprefix("base_model.model."): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118

    @property
    def remark(self) -> str:
        """A sentence for users who load the adapter."""
        return f"{len(self.changed)} weights of {self.base} have the changes of the adapter {self.name}"

    @property
    def changed(self) -> list[str]:
        """Names of the weights that the adapter changes."""
        return sorted({f"{part[1]}.weight" if (part := _PART.fullmatch(key)) else key for key in self.tensors})

    def applied(self, config: PretrainedConfig, weights: WeightsByName) -> tuple[PretrainedConfig, Weights]:
        """Merge the adapter. Returns the configuration and weights of the merged model.

        config, weights  the base's."""
        if (file := self.folder / "config.json").exists():
            whole = read_config(self.folder)
            check_config(whole, file)
            config = whole.get_text_config()
            config.tie_word_embeddings = bool(whole.tie_word_embeddings)
            if reason := unsupported(config):
                raise ModelError(f"{file}: the native decoder cannot run it, {reason}")
            shapes = weight_shapes(config)
            weights = {name: weights[name] for name in shapes if name in weights}
            check_shapes(self.folder, shapes, {name: w.shape for name, w in weights.items()}, config.num_hidden_layers)
        delta = Shape.of(config).delta
        if delta is not None and delta.tiled and any(".linear_attn." in name for name in self.changed):
            raise ModelError(
                f"{self.folder} changes layers with a state, which {self.base} stores in another order than the folder "
                f"of its model: name that folder as the base, or merge with the package peft"
            )
        made = self.merged(weights)
        return untied(config, made), made

    def merged(self, weights: WeightsByName) -> Weights:
        """Merge the changes into the base's weights. A changed matrix in blocks gets blocks of Q8_0, because blocks of
        fewer bits could lose the change.

        ModelError for changes of tensors that the base lacks, or that have another shape."""
        made = {**weights}
        if not self.tensors:
            raise ModelError(f"{self.folder / WEIGHTS} is empty: it has no changes")
        if EMBEDDING in self.changed and HEAD not in weights and not self.config.get("ensure_weight_tying"):
            made[HEAD] = weights[EMBEDDING]  # peft trains a copy of the embedding, and leaves the head alone.
        for name in self.changed:
            base = weights.get(name, weights.get(EMBEDDING) if name == HEAD else None)
            if base is None:
                raise ModelError(
                    f"{self.folder} changes {name}, which {self.base} has not: it belongs to another model, or it is "
                    f"in another layout; {MERGE}"
                )
            new = self._changed(name, base.dense() if isinstance(base, Blocks) else base.float())
            if new.shape != base.shape:
                raise ModelError(
                    f"{self.folder}: {name} has shape {list(new.shape)}, and {list(base.shape)} in {self.base}"
                )
            made[name] = quantise(new, Q8_0) if isinstance(base, Blocks) else new.to(base.dtype)
        return made

    def _changed(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """Return a weight with its change, float32. A module that was trained whole replaces the base's."""
        if name in self.tensors:
            return self.tensors[name].float()
        module = name.removesuffix(".weight")
        try:
            down, up = (self.tensors[f"{module}.lora_{part}.weight"].float() for part in "AB")  # [r, in], [out, r]
            if len(down) == 0:
                raise KeyError(module)
            own = self.tensors.get(f"{module}.base_layer.weight", base)  # peft writes a changed head.
            return own.float() + self._scale(module, len(down)) * (up @ down)
        except (KeyError, RuntimeError):
            raise ModelError(f"{self.folder}: the change of {name} is incomplete or of another shape") from None

    def _scale(self, module: str, rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA. Patterns of alphas match the ends of modules' names."""
        try:
            patterns = self.config.get("alpha_pattern") or {}
            own = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
            alpha = float(next(own, self.config.get("lora_alpha", 8)))
            if not isfinite(alpha):
                raise ValueError(alpha)
        except (TypeError, ValueError, AttributeError, re.error):
            raise ModelError(f"{self.folder / CONFIG}: lora_alpha and values of alpha_pattern are numbers") from None
        return alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)
