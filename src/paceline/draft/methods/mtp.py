"""mtp: the multi-token-prediction head in a target's own checkpoint drafts, applied again to its own output.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437, section 2.2): the target's last state of token j and
the embedding of token j + 1, both normed, are joined by a product. A decoder layer of the target's kind and a norm
follow, and the target's output head predicts token j + 2. FastMTP (Cai et al. 2025, arXiv 2509.18362) tunes the head to
go on from its own output (`paceline train mtp`).

    Engine("models/qwen", draft="mtp")    # the head in the target's folder or file; "mtp:PATH" takes another's

Verified in public code (vLLM: qwen3_next_mtp, qwen3_5_mtp, deepseek_mtp, glm4_moe_mtp, mimo_mtp; transformers 5.23:
MtpModel): the names; the order of the two inputs; the target's state is that after its final norm; the next step reads
the head's own state after its norm (vllm#47448; DeepSeek's path in vLLM took the one before it). Inferred: copies of
embedding and output head in a file are the target's; the first place is like any other (transformers does so; vLLM sets
its embedding to 0 for DeepSeek, GLM and MiMo)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.core.options import option
from paceline.core.segment import Segment
from paceline.draft.models import layers as neural
from paceline.draft.models.assistant import AssistantModel
from paceline.draft.models.layers import Precision
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.states import FeatureConfig, FeatureModel, Network
from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.formats.heads.assistant import is_assistant
from paceline.formats.heads.checkpoint import open_drafter, read_config, recorded_target
from paceline.formats.heads.gguf import head_in as in_file
from paceline.formats.heads.layout import refuse_others
from paceline.formats.heads.mtp import OUTER, check_head, head_in, head_of, head_shape
from paceline.formats.place import find, gguf_of, is_gguf
from paceline.kernels.blocks import WeightsByName, tensors_of, within
from paceline.kernels.linear import linear
from paceline.kernels.ops import Pair
from paceline.target.attention import Layer, begin
from paceline.target.cache import RaggedCache
from paceline.target.decoder import computed_with

HEAD = "multi-token-prediction head"
NEEDS_KIND = "mtp runs a layer of the target's kind"


class MtpNetwork(Network):
    """fc(norm(embedding), norm(state)), a layer of the target's kind, a norm; its output is the next state."""

    def __init__(self, path: str, tensors: WeightsByName, target: Facts, dtype: Precision = "auto"):
        check_head(path, tensors, target.inside.shape if target.inside is not None else None)
        inside = neural.native(target, NEEDS_KIND, "eagle3")
        shape = self.shape = head_shape(inside.shape, tensors)
        # The family's norm_offset is added to all of the head's norms, whatever their names.
        parts = {name: "norm.weight" if name in OUTER[1:] else name for name in tensors}
        computed = {name: computed_with(part, tensors[name], shape) for name, part in parts.items()}
        here = neural.placed(computed, target, dtype)
        self.ops, self.weights = inside.ops, tensors_of(here)
        self.fc = linear([here[OUTER[0]]], None, target.dtype)
        self.layer = Layer(within(here, "layers.0."), shape, inside.ops, shape.layers[0])
        self.taps: tuple[int, ...] = (target.num_layers,)
        self.target, self.head = inside, inside.head
        self.cache = RaggedCache(1, shape.num_kv_heads, shape.head_dim, target.max_context, target.dtype, target.device)
        of_experts = neural.nbytes({name: weight for name, weight in here.items() if ".experts." in name})
        self.nbytes = neural.nbytes(here) - round((1 - inside.expert_share) * of_experts)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """As the target's table has them; of one in blocks only these rows are expanded."""
        return self.target.rows(tokens)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        layout, cache = begin(segments, self.cache, self.shape, self.ops, features)
        of_embedding, of_state, last = (self.weights[name] for name in OUTER[1:])
        x = self.fc(torch.cat([self.ops.norm(embedded, of_embedding), self.ops.norm(features, of_state)], -1))
        residual, delta = self.layer(x, None, layout, cache, 0)
        _, y = self.ops.add_norm(residual, delta, last, self.shape.residual_scale)
        return y, y if layout.wanted is None else y[layout.wanted]


@dataclass(frozen=True, kw_only=True)
class MtpConfig(FeatureConfig):
    """Options of mtp."""

    checkpoint: str | None = option(None, "folder of a head, or a model's folder or GGUF file; none: the target's")  # type: ignore[assignment]


class Mtp(ModelDrafter):
    """Drafts with the multi-token-prediction head in the target's checkpoint, or a tuned one; trees, or chains."""

    name = "mtp"
    paper = "DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437; Cai et al. 2025, FastMTP, arXiv 2509.18362"
    Config = MtpConfig
    config: MtpConfig

    def open(self, target: Facts) -> FeatureModel | AssistantModel:
        """Load the head from the folder or file of the option, or from the target's; or a Gemma 4's assistant."""
        named = self.config.checkpoint or target.folder
        if self.config.checkpoint is None and target.folder is not None and not target.brings_head:
            raise MethodError(f"{target.folder} has no {HEAD}; `paceline train mtp` makes one: mtp:PATH")
        if named is None:
            raise MethodError(f"{target.name} is not from a model's folder, which could have a head: write mtp:PATH")
        path = gguf_of(named) if is_gguf(named) else find(Path(named), [])
        self.config = replace(self.config, checkpoint=str(path))
        if is_assistant(path):
            return AssistantModel(path, self.config, target)
        if is_gguf(named):
            tensors: WeightsByName = in_file(path, neural.native(target, NEEDS_KIND, "eagle3").shape)
        else:
            stored = None if recorded_target(path) is None else open_drafter(path, self.name, target)[1]
            tensors = head_in(path) if stored is None else head_of(stored, stored.__getitem__)
        if not tensors:
            refuse_others(str(path), self.name, {} if is_gguf(named) else read_config(path, self.name), ())
            raise MethodError(f"{path} has no {HEAD}; `paceline train mtp` makes one: mtp:PATH")
        return FeatureModel(MtpNetwork(str(path), tensors, target, self.config.dtype), self.config, target)
