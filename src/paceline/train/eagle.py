"""EAGLE: one layer learns to predict the target's next last state from the one before it and the token between them.

Li et al. 2024 (arXiv 2401.15077), section 3.2: the target is frozen, texts are its own answers, and where the next
token is its own the predicted state is drawn to the true one (SmoothL1), and what the target's head says of it to what
the head says of the true one (cross-entropy with soft labels, a tenth of the weight). States are given with noise, so
that the layer bears with its own errors. Here too the text comes from the target; the authors' is recorded.

Doesn't know: how drafts are made or verified.

    paceline train eagle models/demo --data answers.jsonl --out build/eagle
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from paceline.draft.eagle import Eagle
from paceline.draft.neural.checkpoint import save_drafter
from paceline.errors import PacelineError
from paceline.target.load import read_config
from paceline.target.shape import Shape, rotary_tables, unsupported
from paceline.train import options
from paceline.train.data import Rows
from paceline.train.drafter import Lesson, LessonConfig
from paceline.train.loss import IGNORE, soft_cross_entropy
from paceline.train.plan import LoopConfig
from paceline.train.unrolled import Depth, Memory, Unrolled, UnrolledLayer, by_depth, depth_facts, depth_lines

PASSES = 4
"""Over the answers, where no budget is given; the authors make 20."""
WARMUP = 20
"""Steps."""
DEPTHS = 5
"""Of the drafts whose acceptance is measured in the end."""


class EagleModule(Unrolled):
    """The layer as it is trained."""

    def __init__(self, config: Any) -> None:
        shape = Shape.of(config)
        super().__init__(rotary_tables(config, shape))
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([UnrolledLayer(shape, shape.hidden_size)])
        nn.init.zeros_(self.fc.bias)

    def step(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, features], -1))
        y = self.layers[0](x, x, cos, sin, memory)
        return y, y


class EagleLoss(nn.Module):
    """A layer whose forward is its loss. input_ids, labels [B, T], labels shifted: IGNORE where the next token is not
    the target's own.

    teacher: a transformers model. soft: weight of the cross-entropy. noise: states get as much, uniformly up and
    down."""

    def __init__(self, teacher: Any, soft: float = 0.1, noise: float = 0.1) -> None:
        super().__init__()
        self.module = EagleModule(teacher.config)
        self.soft, self.noise = soft, noise
        # In a list: the target must not appear among the parameters.
        self._teacher = [teacher.eval().requires_grad_(False)]

    @property
    def teacher(self) -> Any:
        """The frozen target."""
        return self._teacher[0]

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> Tensor:
        """The target's last states, after its final norm, [B, T, H]."""
        last: Tensor = self.teacher.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return last

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states = self.states(input_ids)
        given = states + (torch.rand_like(states) * 2 - 1) * self.noise if self.training else states
        (predicted,) = self.module.unroll(given, input_ids, self.teacher.model.embed_tokens.weight, 1)
        kept = labels[:, 1:] != IGNORE
        true = states[:, 1:]
        away = F.smooth_l1_loss(predicted[kept].float(), true[kept].float())
        return away + self.soft * soft_cross_entropy(predicted, true, self.teacher.lm_head.weight, kept)

    def drafted(self, ids: Tensor, steps: int) -> tuple[Tensor, Iterator[Tensor]]:
        """As `Reading`."""
        ids = ids.to(self.teacher.device)
        states = self.states(ids)
        unrolled = self.module.unroll(states, ids, self.teacher.model.embed_tokens.weight, steps)
        return states.cpu(), (read.cpu() for read in unrolled)

    def target_probs(self, states: Tensor) -> Tensor:
        """As `Reading`."""
        probs: Tensor = self.teacher.lm_head(states.to(self.teacher.device)).float().softmax(-1).cpu()
        return probs

    draft_probs = target_probs


def measure(loss: EagleLoss, held: Mapping[str, Rows]) -> list[Depth]:
    """Acceptance by depth on held-out answers."""
    return by_depth(held, loss.eval(), DEPTHS)


def check_target(target: Path) -> None:
    """PacelineError if the native decoder cannot run the model in `target`."""
    reason = unsupported(read_config(target))
    if reason:
        raise PacelineError(f"{target}: the native decoder cannot run it, {reason}; a head would be of no use")


def layer_config(config: Any) -> dict[str, Any]:
    """What config.json says of the layer, in the words of published heads: those of a Llama with one layer."""
    shape = Shape.of(config)
    rope = dict(config.rope_parameters)
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_context,
        "vocab_size": shape.vocab_size,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }


def train_eagle(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: LessonConfig = LessonConfig(),
    soft: float = 0.1,
    noise: float = 0.1,
) -> bool:
    """Train a head for the model in `target` on `answers` (a file of `generated_rows`); writes `out` in bfloat16, for
    `eagle:PATH`, in the layout of published heads. False when interrupted; the same call goes on."""
    check_target(target)
    lesson = Lesson.open(target, answers, config)
    if not lesson.training or not lesson.held:
        raise PacelineError(f"{answers} has too few answers to learn from some and to measure on others: generate more")
    torch.manual_seed(loop.seed)
    loss = EagleLoss(lesson.teacher, soft, noise)
    if not lesson.train(loss, loop, run):
        return False
    if lesson.first:
        depths = measure(loss, lesson.held)
        facts = lesson.facts(Eagle.name, loop, held_out=depth_facts(depths), loss={"soft": soft, "noise": noise})
        facts = {
            "architectures": ["LlamaForCausalLMEagle"],
            **layer_config(lesson.teacher.config),
            "bias": True,
        } | facts
        tensors = {name: weight.to(torch.bfloat16) for name, weight in loss.module.named_parameters()}
        save_drafter(out, Eagle.name, config=facts, tensors=tensors, target=lesson.target_facts())
        shutil.copy(run / "log.jsonl", out / "training.jsonl")
        lesson.report(depth_lines(depths), out)
    return True


@options.with_options
def command(
    setup: options.DrafterOptions,
    lr: options.Rate = 2e-3,
    rows: options.BatchRows = 16,
    soft: Annotated[float, typer.Option(help="Weight of the cross-entropy beside SmoothL1's 1.", min=0)] = 0.1,
    noise: Annotated[float, typer.Option(help="Uniform noise on the states, up and down.", min=0)] = 0.1,
) -> bool:
    """Train a layer that predicts the target's next state and drafts from it, for `--draft eagle:OUT`.

    paceline train eagle models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/eagle

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end
    acceptance is measured by depth on held-out answers.
    """
    check_target(setup.target)
    run, answers = setup.prepare()
    # The paper's AdamW at 3e-5 is for 7 billion parameters and 800,000 steps.
    loop = setup.loop(answers, PASSES, peak_lr=lr, warmup_steps=WARMUP, weight_decay=0.01)
    config = LessonConfig(length=setup.length, rows=rows)
    return train_eagle(setup.target, answers, setup.out, run, loop, config, soft, noise)
