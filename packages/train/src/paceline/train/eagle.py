"""EAGLE and EAGLE-3: one layer over states of the target learns to draft.

EAGLE (Li et al. 2024, arXiv 2401.15077, section 3.2): the layer predicts the target's next last state from the state
before it and the token between them. The loss, where the next token is the target's own, is SmoothL1 between predicted
and true state, plus a tenth of the soft cross-entropy between the distributions that the target's head gives for the
two. Noise on the input states makes the layer robust to its own errors. The text is the target's own, not recorded.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3): no state is predicted. At every step of the training-time test
the head's distribution over its own, smaller vocabulary learns the target's over the same tokens; a step weighs 0.8 of
the one before. Positions whose next token is not in the draft vocabulary are left out. (In the paper those whose best
token is not; to know that takes the target's whole head.) The vocabulary is counted on the answers; the output head
begins as the target's rows and learns. The output is a checkpoint of the `speculators` format, which vLLM reads too
(docs/vllm.md)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.draft.methods.eagle import Eagle
from paceline.draft.methods.eagle3 import Eagle3
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.heads.checkpoint import open_drafter
from paceline.formats.heads.eagle import Flags, default_taps
from paceline.formats.heads.vocab import OFFSETS, from_offsets, to_offsets
from paceline.formats.rotary import rotary_tables
from paceline.formats.shape import Shape
from paceline.target.load import read_config
from paceline.train.loss import IGNORE, distance
from paceline.train.options import DrafterOptions, Layers, layers_of
from paceline.train.student import Student, spread
from paceline.train.trainer import HeadConfig, Trainer, train_head
from paceline.train.unrolled import Memory, Unrolled, UnrolledLayer, begin_as_last

LARGE = 32_768  # A vocabulary of more tokens is large.
MICRO = 4096 if torch.cuda.is_available() else 1024  # Tokens in a forward; with few rows more positions are left out.
SERVED = 3  # Default number of tokens that a server drafts with EAGLE-3.


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """What both methods have in common. The authors make 20 passes, and for EAGLE-3 40 over half a million answers; the
    paper's AdamW at 3e-5 is for 7 billion parameters and 800,000 steps."""

    passes: ClassVar[int] = 4
    own = {"warmup_steps": 20, "weight_decay": 0.01, "micro_tokens": MICRO}


class LayerLoss(Student):
    """A layer over the target's states, in training the `module`."""

    module: Any  # an `Unrolled`

    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(states that the layer reads [B, T, ...], last states after the final norm [B, T, H])."""
        last = self.last_states(input_ids)
        return last, last

    def unroll(self, read: Tensor, input_ids: Tensor, steps: int, at: Tensor | None = None) -> Iterator[Tensor]:
        """`Unrolled.unroll` with the target's embeddings."""
        table = self.teacher.model.embed_tokens.weight
        unrolled: Iterator[Tensor] = self.module.unroll(read, input_ids, table, steps, at)
        return unrolled

    def of_steps(self, input_ids: Tensor, used: Tensor, steps: int, decay: float) -> Tensor:
        """The sum of the distances of so many steps at the positions of `used` [B, T], step s weighing decay**s."""
        (read, last), at = self.states(input_ids), below(used, steps)
        rows, places = used.nonzero(as_tuple=True)
        number = torch.full(used.shape[1:], -1, device=at.device)
        number[at] = torch.arange(len(at), device=at.device)
        drafts, weights = list[Tensor](), list[Tensor]()
        for step, hidden in enumerate(self.unroll(read, input_ids, steps, at)):
            begun = places - 1 - step  # A draft that begins here predicts the token after `places`.
            known = (begun >= 0) & (number[begun] < hidden.shape[1])
            drafts.append(hidden[rows, number[begun] * known])
            weights.append(decay**step * known / known.sum().clamp_min(1))
        everywhere, shares = torch.ones_like(rows, dtype=torch.bool), torch.stack(weights, -1)
        # All steps at once: the target's distribution of a token is the same, and the gradient of the head is large.
        together = self.distance(torch.stack(drafts, 1), last[rows, places], everywhere, weights=shares)
        return shares.sum() * together

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        read, last = self.states(input_ids)
        return last, self.unroll(read, input_ids, depths)

    def saved(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())


def below(used: Tensor, steps: int) -> Tensor:
    """The positions, int64 ascending, below which so many steps draft something for the positions of `used` [B, T]."""
    ahead = used.any(0)
    ahead = torch.stack([F.pad(ahead[1 + step :], (0, 1 + step)) for step in range(steps)]).any(0)
    at = ahead.nonzero().flatten()
    return at if len(at) else torch.zeros(1, dtype=torch.long, device=used.device)


# EAGLE -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """The loss of EAGLE's first head."""

    soft: float = option(0.1, "Weight of the cross-entropy in the loss; SmoothL1 has the weight 1.", least=0)
    noise: float = option(0.1, "Add uniform noise of at most this to the states, up or down.", least=0)

    def student(self, trainer: Trainer) -> Student:
        return EagleLoss(trainer.teacher, self)


class EagleModule(Unrolled):
    def __init__(self, config: Any) -> None:
        shape = Shape.of(config)
        super().__init__(rotary_tables(config, shape))
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([UnrolledLayer(shape, shape.hidden_size)])
        nn.init.zeros_(self.fc.bias)
        begin_as_last(self.fc)

    def step(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, features], -1))
        y = self.layers[0](x, x, cos, sin, memory)
        return y, y


class EagleLoss(LayerLoss):
    """The layer and its loss: SmoothL1 of the states, and the distance of their distributions."""

    kind = Eagle.name

    def __init__(self, teacher: Any, config: EagleConfig = EagleConfig()) -> None:
        super().__init__(teacher, config.loss)
        self.config = config
        self.module = EagleModule(teacher.config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states = self.last_states(input_ids)
        noisy = states + (torch.rand_like(states) * 2 - 1) * self.config.noise if self.training else states
        at = below(labels != IGNORE, 1)
        (predicted,) = self.unroll(noisy, input_ids, 1, at)
        true, known = states[:, at + 1], labels[:, at + 1] != IGNORE
        regression = F.smooth_l1_loss(predicted[known].float(), true[known].float())
        return regression + self.config.soft * self.distance(predicted, true, known)

    def facts(self) -> dict[str, Any]:
        loss = {"soft": self.config.soft, "noise": self.config.noise}
        architecture = {"architectures": ["LlamaForCausalLMEagle"], **layer_config(self.teacher.config), "bias": True}
        return architecture | {"loss": loss}


def layer_config(config: Any) -> dict[str, Any]:
    """The layer's entries in config.json, as in published heads: those of a Llama with one layer."""
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


def command(setup: DrafterOptions, config: EagleConfig) -> bool:
    """Train a layer that drafts by predicting the target's next state, for `--draft eagle:OUT`.

    paceline train eagle smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/eagle

    At the end acceptance is measured by depth on held-out answers."""
    return train_head(setup.training(config), config)


# EAGLE-3 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlagOptions(Flags):
    """The head's norms as options. Defaults: EAGLE-3.1."""

    norm_before_residual: bool = option(False, "Use the normed feature as the residual.")
    norm_before_fc: bool = option(False, "Use one norm over all tapped states.")
    fc_norm: bool = option(True, "Use a norm for each tapped state (EAGLE-3.1).")
    norm_output: bool = option(True, "Feed back the normed output (EAGLE-3.1).")


@dataclass(frozen=True, kw_only=True)
class TapsConfig(LayerConfig):
    """What drafters over several of the target's states, with a draft vocabulary, have in common.

    whole  whether that vocabulary has all tokens, if its size is left out."""

    whole: ClassVar[bool] = False

    vocab: int | None = option(
        None, "Size of the draft vocabulary. [default: half of the target's, a quarter of a large one]", least=1
    )
    loss_vocab: int = 1 << 31  # the loss compares the draft vocabulary
    taps: Layers | None = option(
        None, "Layers whose inputs are read, as in 2,4,5. [default: the paper's]", parser=layers_of("--taps")
    )

    def check(self, target: Path) -> None:
        super().check(target)
        layers = Shape.of(read_config(target)).num_layers
        taps = self.taps_of(layers)
        if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= layers:
            raise PacelineError(
                f"--taps is {','.join(map(str, taps))}, and {target} has {layers} layers: "
                f"ascending numbers of 0 to {layers - 1}, such as {','.join(map(str, default_taps(layers)))}"
            )

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs are read in a target of so many layers."""
        return default_taps(layers) if self.taps is None else self.taps

    def drafted(self, trainer: Trainer, kind: str) -> tuple[Tensor, float]:
        """The draft vocabulary, int64 ascending, and its share of the held-out answers; kind: of the drafter."""
        total = trainer.teacher.config.vocab_size
        if self.begin is None:
            part = 1 if self.whole else 2 if total <= LARGE else 4
            keep = trainer.frequent(self.vocab or total // part)
        else:
            tensors = open_drafter(self.begin, kind, None)[1]
            keep = from_offsets(tensors[OFFSETS], None) if OFFSETS in tensors else torch.arange(total)
            if self.vocab not in (None, len(keep)):
                raise PacelineError(f"--vocab is {self.vocab}, and the head in {self.begin} drafts {len(keep)} tokens")
        keep, share = keep.to(trainer.teacher.device), trainer.covered(keep)
        trainer.console.print(
            f"{len(keep):,} tokens to draft: {share:.2%} of what the target writes in held-out answers"
        )
        return keep, share


class TapsLoss(Student):
    """A drafter over several of the target's states, in training the `module`, with a draft vocabulary.

    keep        int64 [D]: the draft vocabulary, ascending.
    of_trainer  further entries of config.json."""

    module: Any
    tokens: Tensor
    of_target: Tensor

    def __init__(self, teacher: Any, keep: Tensor, config: TapsConfig, of_trainer: dict[str, Any]) -> None:
        super().__init__(teacher, config.loss)
        self.tokens, self.of_trainer, self.vocab_size = keep, of_trainer, teacher.config.vocab_size
        self.reads = config.taps_of(teacher.config.num_hidden_layers)
        self.register_buffer("of_target", teacher.lm_head.weight[keep].detach().clone(), persistent=False)

    def taps(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(the states that it reads side by side, [B, T, taps * H]; the last ones after the final norm, [B, T, H])."""
        states, last = self.target_states(input_ids)
        return states[..., :-1, :].flatten(-2), last

    def distance(
        self, hidden: Tensor, last: Tensor, where: Tensor, depth: int = 0, weights: Tensor | None = None
    ) -> Tensor:
        return self.compared(hidden, self.table(), last, where, weights)

    def compared(self, hidden: Tensor, table: Tensor, last: Tensor, where: Tensor, weights: Tensor | None) -> Tensor:
        """`loss.distance` over the draft vocabulary."""
        compiled = self.compiled and self.training
        return distance(self.loss, hidden, table, last, self.of_target, where, compiled=compiled, weights=weights)

    def probs(self, hidden: Tensor, depth: int) -> Tensor:
        return spread((hidden @ self.table().T).float().softmax(-1), self.tokens, self.vocab_size)

    def saved(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters()) | to_offsets(self.tokens, self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(TapsConfig):
    """The steps and the width of EAGLE-3's layer."""

    own = {**LayerConfig.own, "clip": 0.5}

    steps: int = option(3, "Number of steps of the training-time test: the depth that the head learns.", least=1)
    decay: float = option(0.8, "Weight of a step in the loss relative to the step before.", least=0)
    mlp: int | None = option(None, "Width of the layer's MLP. [default: the target's]", least=1)
    flags: FlagOptions = field(default_factory=FlagOptions)

    def student(self, trainer: Trainer) -> Student:
        keep, share = self.drafted(trainer, Eagle3.name)
        return Eagle3Loss(trainer.teacher, keep, self, coverage=share)


class Eagle3Module(Unrolled):
    """The head in training. Parameters are named as in the files."""

    def __init__(self, config: Any, taps: int, vocab: int, flags: Flags, mlp: int | None = None) -> None:
        shape = Shape.of(config)
        shape = replace(shape, intermediate_size=mlp or shape.intermediate_size)
        super().__init__(rotary_tables(config, shape))
        hidden = shape.hidden_size
        self.flags = flags
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        begin_as_last(self.fc)
        self.layers = nn.ModuleList([UnrolledLayer(shape, 2 * hidden, ("input_layernorm", "hidden_norm"))])
        self.norm = nn.RMSNorm(hidden, shape.eps)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        if flags.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps * hidden, shape.eps)
        if flags.fc_norm:
            self.fc_norm = nn.ModuleList([nn.RMSNorm(hidden, shape.eps) for _ in range(taps)])

    def first(self, taps: Tensor) -> Tensor:
        if self.flags.norm_before_fc:
            taps = self.input_norm(taps)
        if self.flags.fc_norm:
            parts = taps.chunk(len(self.fc_norm), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        features: Tensor = self.fc(taps)
        return features

    def step(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(features)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        y = layer(x, normed if self.flags.norm_before_residual else features, cos, sin, memory)
        read = self.norm(y)
        return (read if self.flags.norm_output else y), read


class Eagle3Loss(TapsLoss, LayerLoss):
    """A head whose forward is its loss: weighted distances of its steps, over the draft vocabulary."""

    kind = Eagle3.name
    is_kept: Tensor

    def __init__(self, teacher: Any, keep: Tensor, config: Eagle3Config = Eagle3Config(), **of_trainer: Any) -> None:
        super().__init__(teacher, keep, config, of_trainer)
        self.config = config
        self.module = Eagle3Module(teacher.config, len(self.reads), len(keep), config.flags, config.mlp)
        with torch.no_grad():
            self.module.lm_head.weight.copy_(self.of_target)
            # Logits begin near 1: the target's own norm would make an untrained head sure of its guesses.
            self.module.norm.weight.fill_(1 / self.of_target.norm(dim=1).mean())
        is_kept = torch.zeros(self.vocab_size, dtype=torch.bool)
        is_kept[keep] = True
        self.register_buffer("is_kept", is_kept, persistent=False)

    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.taps(input_ids)

    def table(self, depth: int = 0) -> Tensor:
        """The head's own rows [D, H]."""
        table: Tensor = self.module.lm_head.weight
        return table

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        used = (labels != IGNORE) & self.is_kept[labels.clamp_min(0)]
        return self.of_steps(input_ids, used, self.config.steps, self.config.decay)

    def facts(self) -> dict[str, Any]:
        config = speculators_config(self.teacher.config, self.reads, len(self.tokens), self.config.flags)
        if self.config.mlp:
            config["transformer_layer_config"]["intermediate_size"] = self.config.mlp
        return config | self.of_trainer


def speculators_config(config: Any, taps: tuple[int, ...], vocab: int, flags: Flags) -> dict[str, Any]:
    """config.json in the `speculators` format, which vLLM reads, of a head for the model with `config`."""
    name = Path(config.name_or_path).expanduser().resolve().name
    method = {"proposal_type": "greedy", "speculative_tokens": SERVED, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": list(config.architectures or [])},
        },
        "transformer_layer_config": layer_config(config),
        "draft_vocab_size": vocab,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "tie_word_embeddings": False,
        **asdict(flags),
    }


def eagle3_command(setup: DrafterOptions, config: Eagle3Config) -> bool:
    """Train a layer that drafts from three of the target's states, for `--draft eagle3:OUT` and for vLLM.

    paceline train eagle3 smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/eagle3

    At the end acceptance is measured by depth on held-out answers. OUT is a checkpoint in the `speculators` format."""
    return train_head(setup.training(config), config)
