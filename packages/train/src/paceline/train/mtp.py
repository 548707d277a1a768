"""mtp: one head learns to draft several tokens, applied again and again to its own output (FastMTP).

Cai et al. 2025, "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction" (arXiv 2509.18362): the
multi-token-prediction head of a checkpoint, which was trained for one step, learns K on the target's own answers. All
steps share its weights; step k weighs beta^(k - 1), divided by the sum of these. Embedding and output head are the
target's. As in drafting, a step reads the text's keys of step 0 (`unrolled.py`). It learns the target's distribution
(`--loss`), not the token alone. Where the target has no head, one is begun: a copy of its last layer that adds nothing
at first. The layer is transformers' own module, so that a head has whatever the layers of its family have."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from paceline.draft.methods.mtp import Mtp
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.experts import as_checkpoint, as_state
from paceline.formats.heads.mtp import check_head, head_in, head_shape
from paceline.formats.shape import Shape
from paceline.target.load import read_config
from paceline.train.eagle import LayerConfig, LayerLoss
from paceline.train.loss import IGNORE
from paceline.train.options import DrafterOptions
from paceline.train.student import Student
from paceline.train.trainer import Trainer, train_head, training_folder
from paceline.train.unrolled import Memory, Unrolled, attend, begin_as_last

ATTENTION = "paceline_unrolled"  # transformers' name for the attention of steps.


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """How the head is tuned. The authors: three steps, beta 0.6."""

    steps: int = option(3, "Number of steps that the head learns: the depth of its drafts.", least=1)
    decay: float = option(0.6, "Weight of a step in the loss relative to the step before.", least=0)
    lr: float = option(0.0, "Peak learning rate; 0: 2e-4 for an existing head, 2e-3 for a new one.", least=0)

    def check(self, target: Path) -> None:
        super().check(target)
        if head := head_in(target):
            check_head(target, head, Shape.of(read_config(target)))

    def student(self, trainer: Trainer) -> Student:
        head = head_in(training_folder(trainer.training.target))
        trainer.console.print("the target's own head is tuned" if head else "the target has no head: one is begun")
        return MtpLoss(trainer.teacher, self, head)


def attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, *, memory: Memory, scaling: float, **ignored: Any
) -> tuple[Tensor, None]:
    """`attend` as transformers calls it; [B, T, heads, head_dim]."""
    return attend(q, k, v, memory, scaling).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)


class MtpModule(Unrolled):
    """The head in training, named as in `methods/mtp.py`, experts as in transformers. head: what it begins with."""

    def __init__(self, teacher: Any, head: Mapping[str, Tensor]) -> None:
        shape, norm, body = Shape.of(teacher.config), teacher.model.norm, teacher.model.layers
        kinds, alike = shape.layers, [n for n, one in enumerate(body) if hasattr(one, "self_attn")]
        experts = {head_shape(shape, head).layers[0].experts} if head else {True, False}
        alike = [n for n in alike if kinds[n].rope is not None and kinds[n].experts in experts]
        if not alike:
            raise PacelineError("the head in the target's folder is like none of its layers: it cannot be tuned here")
        number = max(alike, key=lambda n: (kinds[n].window is None, n))
        super().__init__(turns_of(teacher, number))
        size = shape.hidden_size, shape.eps
        self.fc = nn.Linear(2 * size[0], size[0], bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (type(norm)(*size) for _ in range(3))
        layer = copy.deepcopy(body[number])
        layer.self_attn.config._attn_implementation = ATTENTION
        self.layers = nn.ModuleList([layer])
        with torch.no_grad():
            if head:
                shapes = {name: tensor.shape for name, tensor in self.state_dict().items()}
                self.load_state_dict(as_state(head, shapes))
            else:
                begin_as_last(self.fc)
                for name, weight in layer.named_parameters():
                    if "o_proj" in name or "down_proj" in name:
                        weight.zero_()
                # As in `Eagle3Loss`: the target's own norm would make an untrained head sure of its guesses.
                self.norm.weight.add_(1 / float(teacher.lm_head.weight.norm(dim=1).mean()) - 1)
        self.requires_grad_(True)

    def step(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)], -1))
        turns, whole = (cos[None].to(x), sin[None].to(x)), not memory.steps
        read = self.norm(self.layers[0](x, position_embeddings=turns, memory=memory))
        if whole and memory.at is not None:  # the family's layer has run at all positions of the text
            read = read.index_select(1, memory.at)
        return read, read


def turns_of(teacher: Any, layer: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [max_context, rotated numbers], as transformers' module gives them to a layer."""
    kinds, ropes = getattr(teacher.config, "layer_types", None), dict(teacher.config.rope_parameters)
    kind = {"layer_type": kinds[layer]} if kinds and kinds[layer] in ropes else {}
    places = torch.arange(Shape.of(teacher.config).max_context, device=teacher.device)[None]
    cos, sin = teacher.model.rotary_emb(torch.zeros(1, device=teacher.device), places, **kind)
    return cos[0], sin[0]


class MtpLoss(LayerLoss):
    """A head whose forward is its loss: distances of its steps from the target's distribution, weighted."""

    kind = Mtp.name

    def __init__(self, teacher: Any, config: MtpConfig = MtpConfig(), head: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(teacher, config.loss)
        self.config, self.head = config, head or {}
        self.module = MtpModule(teacher, self.head)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        steps, decay = self.config.steps, self.config.decay
        total = self.of_steps(input_ids, labels != IGNORE, steps, decay)
        return total / sum(decay**k for k in range(steps))

    def saved(self) -> dict[str, Tensor]:
        return {f"mtp.{name}": tensor for name, tensor in as_checkpoint(super().saved()).items()}

    def untrained(self) -> Student | None:
        return MtpLoss(self.teacher, self.config, self.head).to(self.teacher.device) if self.head else None


def command(setup: DrafterOptions, config: MtpConfig) -> bool:
    """Tune a target's multi-token-prediction head for several steps, or begin one, for `--draft mtp:OUT`.

    paceline train mtp MODEL --prompts mine=prompts.jsonl --generate 5000 --out build/mtp

    At the end acceptance is measured by depth on held-out answers, and compared with the original head. OUT has the
    tensors under the names of Qwen3-Next's checkpoints."""
    if not config.lr:
        config = replace(config, lr=2e-4 if head_in(training_folder(setup.target)) else 2e-3)
    return train_head(setup.training(config), config)
