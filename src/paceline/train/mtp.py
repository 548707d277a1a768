"""mtp: one head learns to draft several tokens, applied again and again to its own output (FastMTP).

Cai et al. 2025, "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction" (arXiv 2509.18362): the
multi-token-prediction head of a checkpoint, which was trained for one step, learns K on the target's own answers. All
steps share its weights; step k weighs beta^(k - 1), divided by the sum of these. Embedding and output head are the
target's and do not learn. As in drafting, a step reads the keys of the text from step 0 (`unrolled.py`), and it learns
the target's distribution (`--loss`) instead of the token alone.

Where the target has no head, one is begun: a copy of its last layer that adds nothing to the state at first. The layer
is transformers' own module of the target's family, so that a head has whatever that family's layers have."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from paceline.draft.mtp import Mtp, check_head, head_in, head_shape, published
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.target.load import read_config
from paceline.target.shape import Shape, as_checkpoint
from paceline.train.config import training_folder
from paceline.train.eagle import LayerConfig, LayerLoss
from paceline.train.loss import IGNORE
from paceline.train.options import DrafterOptions, drafter_command
from paceline.train.student import Student
from paceline.train.trainer import Trainer, train_head
from paceline.train.unrolled import Memory, Unrolled, attend, begin_as_last

ATTENTION = "paceline_unrolled"  # transformers' name for the attention of steps
RATES = {True: 2e-4, False: 2e-3}
"""Peak learning rates of a head that is there, and of a new one."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """How the head is tuned. The authors: three steps, beta 0.6."""

    steps: int = option(3, "Steps that the head learns: the depth of its drafts.", least=1)
    decay: float = option(0.6, "Weight of a step relative to the one before.", least=0)
    lr: float = option(0.0, "Peak learning rate; 0: 2e-4 for a head that is there, 2e-3 for a new one.", least=0)

    def check(self, target: Path) -> None:
        super().check(target)
        if head := head_in(target):
            check_head(target, head, head_shape(Shape.of(read_config(target)), head))

    def student(self, trainer: Trainer) -> Student:
        head = head_in(training_folder(trainer.training.target))
        trainer.console.print(
            "the target's own head is tuned" if head else "the target has no head: a new one is begun"
        )
        return MtpLoss(trainer.teacher, self, head)


def attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, *, memory: Memory, scaling: float, **ignored: Any
) -> tuple[Tensor, None]:
    """`attend` as transformers calls it; [B, T, heads, head_dim]."""
    return attend(q, k, v, memory, scaling).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)


class MtpModule(Unrolled):
    """The head in training. Parameters are named as in `draft/mtp.py`, experts as in transformers.

    head  tensors to begin with; empty: a new head."""

    def __init__(self, teacher: Any, head: Mapping[str, Tensor]) -> None:
        shape, norm = Shape.of(teacher.config), teacher.model.norm
        kinds = shape.layers
        wanted = (head_shape(shape, head) if head else shape).layers[-1].experts
        with_attention = [n for n, one in enumerate(teacher.model.layers) if hasattr(one, "self_attn")]
        alike = [n for n in with_attention if kinds[n].experts == wanted and kinds[n].rope is not None]
        if not alike:
            what = "experts" if wanted else "a plain MLP"
            raise PacelineError(f"the head in the target's folder has {what}, and no layer of the target has")
        number = max(alike, key=lambda n: (kinds[n].window is None, n))
        super().__init__(turns_of(teacher, number))
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.enorm, self.hnorm, self.norm = (type(norm)(shape.hidden_size, shape.eps) for _ in range(3))
        layer = copy.deepcopy(teacher.model.layers[number])
        layer.self_attn.config._attn_implementation = ATTENTION
        self.layers = nn.ModuleList([layer])
        with torch.no_grad():
            if head:
                self.load_state_dict(joined(head, self.state_dict()))
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
        x = self.fc(torch.cat([self.enorm(embedded), self.hnorm(features)], -1))
        turns = cos[None].to(x), sin[None].to(x)
        read = self.norm(self.layers[0](x, position_embeddings=turns, memory=memory))
        return read, read


def turns_of(teacher: Any, layer: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [max_context, rotated numbers], as transformers' module gives them to a layer."""
    config = teacher.config
    nested = any(isinstance(one, Mapping) for one in dict(getattr(config, "rope_parameters", None) or {}).values())
    kind = {"layer_type": config.layer_types[layer]} if nested else {}
    places = torch.arange(Shape.of(config).max_context, device=teacher.device)[None]
    cos, sin = teacher.model.rotary_emb(torch.zeros(1, device=teacher.device), places, **kind)
    return cos[0], sin[0]


def joined(head: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors by the names of `like`, transformers' module, in which matrices of all experts are one tensor:
    the inverse of `as_checkpoint`."""
    made = {}
    for name, tensor in like.items():
        start, of_experts, which = name.rpartition(".experts.")
        if not of_experts:
            made[name] = head[name]
            continue
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
        each = ([head[f"{start}.experts.{n}.{part}.weight"] for part in parts] for n in range(len(tensor)))
        made[name] = torch.stack([torch.cat(one) for one in each])
    return made


class MtpLoss(LayerLoss):
    """A head whose forward is its loss: distances of its steps from the target's distribution, weighted."""

    kind = Mtp.name

    def __init__(self, teacher: Any, config: MtpConfig = MtpConfig(), head: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(teacher, config.loss)
        self.config, self.head = config, head or {}
        self.module = MtpModule(teacher, self.head)

    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        last = self.last_states(input_ids)
        return last, last

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        read, last = self.states(input_ids)
        total, weights = torch.zeros((), device=last.device), [self.config.decay**k for k in range(self.config.steps)]
        for step, (hidden, weight) in enumerate(zip(self.unroll(read, input_ids, len(weights)), weights, strict=True)):
            known = labels[:, 1 + step :] != IGNORE
            total = total + weight / sum(weights) * self.distance(hidden, last[:, 1 + step :], known)
        return total

    def saved(self) -> dict[str, Tensor]:
        return {published(name): tensor for name, tensor in as_checkpoint(super().saved()).items()}

    def untrained(self) -> Student | None:
        """The target's own head, if it has one."""
        return MtpLoss(self.teacher, self.config, self.head).to(self.teacher.device) if self.head else None


@drafter_command
def command(setup: DrafterOptions, config: MtpConfig) -> bool:
    """Tune a target's multi-token-prediction head for several steps, or begin one, for `--draft mtp:OUT`.

    paceline train mtp MODEL --prompts mine=prompts.jsonl --generate 5000 --out build/mtp

    At the end acceptance is measured by depth on held-out answers, beside the head that was there. OUT has the tensors
    under the names of Qwen3-Next's checkpoints."""
    if not config.lr:
        config = replace(config, lr=RATES[bool(head_in(training_folder(setup.target)))])
    return train_head(setup.training(config), config)
