"""Draft models, distilled on the target's answers; and streams, with which a draft proposes several tokens a forward.

A draft is a small Llama with the target's tokenizer. Its distribution q learns the target's p at every token. The loss
is KL(p || q) plus the total variation, which is the rate at which drafts are rejected (Zhou et al. 2024, "DistillSpec:
Improving speculative decoding via knowledge distillation", section 4).

Streams are Speculative Streaming (Bhendawade et al. 2024, arXiv 2402.11131), as Mirror-SD uses it on the draft (arXiv
2510.13161). In the draft's last layers every token t has `count` more states, its streams. Stream j begins as the
token's state M_t, plus a low-rank projection of M_t and an embedding of j. It attends to the tokens up to t and to the
streams 1..j of t. From it the draft's own head predicts the token j places after the one that M_t predicts. The loss is

    a_0 CE(M_t, y_{t+1}) + sum_j a_j CE(S_{t,j}, y_{t+1+j}),    a_j = 1, 1/2, 1/4, ...

on the target's own answers. Tokens never attend to streams, so the output folder is an ordinary draft model with one
more file, the streams. With `keep` the draft is frozen and only the streams learn.

Difference to the paper: the projection is added to the state and begins at 0, so that a stream begins as its token."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline import __version__
from paceline.draft.models.streams import FILE, KEY
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.target.load import read_config
from paceline.train.layers import use_blocks
from paceline.train.loss import IGNORE, Distance, chunked_cross_entropy
from paceline.train.measure import fit_lines, measure, rows_of
from paceline.train.options import Compiled, DrafterOptions, drafter_command
from paceline.train.saving import save_tensors
from paceline.train.student import Student, chain
from paceline.train.trainer import (
    LOSS_HELP,
    StudentConfig,
    Trainer,
    TrainerConfig,
    Training,
    dtype_of,
    open_teacher,
    pad_token,
    training_folder,
)
from paceline.workbench.llama import ModelConfig, new_llama


@dataclass(frozen=True, kw_only=True)
class DraftConfig(StudentConfig):
    """The shape of a draft, and what a batch is made of. It begins with random weights, so it makes many passes."""

    passes: ClassVar[int] = 20

    layers: int = option(3, "Number of layers of the draft model.", least=1)
    hidden: int = option(128, "Width of the draft model, a multiple of 64.", least=64)
    rows: int = option(32, "Number of rows in a batch.", least=1)
    loss: Distance = option("kl+tv", LOSS_HELP)

    def __post_init__(self) -> None:
        if self.hidden % 64:
            raise PacelineError(f"--hidden is {self.hidden}; heads are 64 wide, so it is a multiple of 64")

    def shape(self, positions: int) -> ModelConfig:
        """The shape of a draft for a target with a context of `positions` tokens."""
        return ModelConfig(
            hidden=self.hidden, layers=self.layers, heads=self.hidden // 64, kv_heads=1, intermediate=3 * self.hidden,
            positions=min(ModelConfig.positions, positions),
        )  # fmt: skip


class DistilLoss(Student):
    """A draft model whose forward is its distance from the target. input_ids [B, T]. Labels are not used: p is known at
    every position, so all positions but padding are trained on."""

    kind = "draft"

    def __init__(self, draft: Any, target: Any, pad: int, compiled: bool = False, loss: Distance = "kl+tv") -> None:
        super().__init__(target, loss)
        self.draft = draft
        if compiled:
            use_blocks(draft, target)
        self.compiled, self.pad = compiled, pad
        # A function, not a module: the compiled copy must not appear among the parameters.
        self._run = torch.compile(self._hidden) if compiled else self._hidden

    def _hidden(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        last = self.last_states(input_ids)
        return self.draft.model(input_ids=input_ids, use_cache=False).last_hidden_state, last

    def table(self, depth: int = 0) -> Tensor:
        table: Tensor = self.draft.lm_head.weight
        return table

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, last = (self._run if self.training and not self.cache else self._hidden)(input_ids)
        # Padding is a run of the pad token up to the end of the row. A single one may begin a document.
        following = torch.cat([input_ids[:, 1:], torch.full_like(input_ids[:, :1], self.pad)], 1)
        return self.distance(hidden, last, (input_ids != self.pad) | (following != self.pad))

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        hidden, last = self._hidden(input_ids)
        return last, chain(hidden, depths)


def train_draft(training: Training, config: DraftConfig = DraftConfig(), compiled: bool = True) -> bool:
    """Train a draft and write a model folder in bfloat16, for `model:PATH`. False when interrupted; it goes on."""
    trainer = Trainer.open(training, config)
    facts = trainer.teacher.config
    network: Any = new_llama(
        config.shape(facts.max_position_embeddings), training.loop.seed, vocab_size=facts.vocab_size,
        bos_token_id=facts.bos_token_id, eos_token_id=facts.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    begin_embedding(network, trainer.teacher.get_input_embeddings().weight)
    student = DistilLoss(network, trainer.teacher, pad_token(trainer.tokenizer), compiled, config.loss)
    trainer.prepare(student, config)
    if not trainer.train(student):
        return False
    if trainer.first:
        _, measured, lines = trainer.held_out(student)
        of_target = {"paceline": __version__, "target": asdict(trainer.target_facts())}
        trainer.save_model(network, torch.bfloat16, of_target | trainer.facts(student.kind, **measured))
        trainer.report(lines)
    return True


@drafter_command
def command(setup: DrafterOptions, config: DraftConfig, compiled: Compiled = True) -> bool:
    """Train a draft model on the target's own answers, recorded or generated, for `--draft model:OUT`.

    paceline train model smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/draft

    At the end the share of the draft's tokens that the target would accept is measured on held-out answers."""
    return train_draft(setup.training(config), config, compiled)


@torch.no_grad()
def begin_embedding(network: Any, table: Tensor) -> None:
    """Begin a draft's embedding, which is its output head too, as the target's [V, H], along the axes in which its rows
    differ most, scaled to rows of length 1: with a large vocabulary most of a draft is its embedding."""
    own = network.get_input_embeddings().weight
    size = min(own.shape[1], table.shape[1])
    rows = table - table.mean(0)  # what all rows share changes no probability
    rows = rows @ torch.linalg.eigh(rows.T @ rows)[1][:, -size:].flip(1)
    own[:, :size] = rows / rows.norm(dim=1).mean()


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(TrainerConfig):
    """What is added to a draft model, which is trained already, and what a batch is made of.

    The mask over tokens and streams is quadratic in the length: longer rows cost more than they teach."""

    passes: ClassVar[int] = 3
    own = {"warmup_steps": 20}

    count: int = option(
        2, "Number of streams: tokens that a forward proposes after the next one.", least=1, names=("--streams",)
    )
    layers: int = option(1, "Number of last layers of the draft model that run streams.", least=1)
    rank: int = option(32, "Rank of the projection with which a stream begins.", least=1)
    keep: bool = option(False, "Freeze the draft model and train only the streams.", names=("--keep",))
    length: int = option(128, "Number of tokens in a training row.", least=8, most=128)
    lr: float = option(3e-4, "Peak learning rate.", least=0)


class StreamsLoss(Student):
    """A draft model with streams whose forward is its loss. It is the streams' teacher: they are measured against it.

    draft   a transformers model of the Llama kind; its last `layers` layers run `count` streams.
    keep    freeze the draft."""

    def __init__(self, draft: Any, count: int, layers: int, rank: int, keep: bool = False) -> None:
        super().__init__(draft, "")
        size = draft.config.hidden_size
        self.layers, self.depths = layers, count
        self.down = nn.Parameter(torch.randn(rank, size) / size**0.5)
        self.up = nn.Parameter(torch.zeros(size, rank))
        self.embedding = nn.Parameter(0.02 * torch.randn(count, size))
        draft.set_attn_implementation("sdpa")  # takes the mask below
        self.trained = None if keep else draft.requires_grad_(True)

    def states(self, input_ids: Tensor) -> Tensor:
        """Inputs of the output head, [B, 1 + count, T, H]: of the tokens, then of every stream."""
        model, count, length = self.teacher.model, len(self.embedding), input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        x = model.embed_tokens(input_ids)
        turns = model.rotary_emb(x, places[None])
        inner = len(model.layers) - self.layers
        for layer in model.layers[:inner]:
            x = layer(x, position_embeddings=turns)
        begin = x + x @ self.down.T @ self.up.T
        x = torch.cat([x, *(begin + mark for mark in self.embedding)], 1)
        turns = model.rotary_emb(x, torch.cat([places + j for j in range(count + 1)])[None])
        mask = seen(length, count).to(x.device)[None, None]
        for layer in model.layers[inner:]:
            x = layer(x, attention_mask=mask, position_embeddings=turns)
        states: Tensor = model.norm(x).unflatten(1, (count + 1, length))
        return states

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states = self.states(input_ids)
        total = torch.zeros((), device=states.device)
        for j in range(0 if self.trained else 1, states.shape[1]):
            total = total + 0.5**j * chunked_cross_entropy(states[:, j], self.table(), later(labels, j))
        return total

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        main, *streams = self.states(input_ids).unbind(1)
        return main, (of_stream[:, : -1 - k] for k, of_stream in enumerate(streams[:depths]))


def seen(length: int, count: int) -> Tensor:
    """Attention mask, bool [(1 + count) T, (1 + count) T], rows are queries: the tokens, then their first streams, and
    so on. All attend to the tokens up to their own; stream j also to the streams 1..j of its token."""
    kind, place = (x.flatten() for x in torch.meshgrid(torch.arange(count + 1), torch.arange(length), indexing="ij"))
    tokens = (kind[None] == 0) & (place[None] <= place[:, None])
    streams = (kind[None] > 0) & (kind[None] <= kind[:, None]) & (place[None] == place[:, None])
    return tokens | streams


def later(labels: Tensor, steps: int) -> Tensor:
    """Labels [B, T] of the tokens `steps` places later; IGNORE unless all tokens up to there are the target's own."""
    is_known, result = labels != IGNORE, labels
    for _ in range(steps):
        result = nn.functional.pad(result[:, 1:], (0, 1), value=IGNORE)
        is_known = is_known & (result != IGNORE)
    return torch.where(is_known, result, IGNORE)


def train_streams(training: Training, draft: Path, config: StreamsConfig) -> bool:
    """Train streams for the draft model in `draft` on the target's answers; writes a folder in the draft's own dtype,
    for `model:OUT,streams=N`. False when interrupted; the same call goes on."""
    shape, of_target = read_config(draft), read_config(training_folder(training.target))
    if config.layers > shape.num_hidden_layers:
        raise PacelineError(f"--layers is {config.layers}; {draft} has {shape.num_hidden_layers}")
    if shape.vocab_size != of_target.vocab_size:
        raise PacelineError(f"{draft} has {shape.vocab_size} tokens, and {training.target} has {of_target.vocab_size}")
    trainer = Trainer.open(training, config)
    network = open_teacher(draft).to(trainer.teacher.device)
    module = StreamsLoss(network, config.count, config.layers, config.rank, config.keep)
    if not trainer.train(module):
        return False
    if trainer.first:
        student = DistilLoss(network.eval(), trainer.teacher, pad_token(trainer.tokenizer))
        _, measured, lines = trainer.held_out(student)
        fits = measure(module, trainer.held)
        if fits:
            lines += ["the streams, against the draft:", *fit_lines(fits, "stream")]
        dtype = dtype_of(draft)
        own = {name: p.to(dtype) for name, p in module.named_parameters() if name in ("down", "up", "embedding")}
        training.out.mkdir(parents=True, exist_ok=True)
        save_tensors(training.out / FILE, own, {"format": "pt"})
        facts = trainer.facts("streams", fit=rows_of(fits), **measured)
        trainer.save_model(network, dtype, {KEY: {"layers": config.layers, **facts}})
        trainer.report(lines)
    return True


@drafter_command
def streams_command(
    setup: DrafterOptions,
    config: StreamsConfig,
    draft: Path = option(help="Folder of the draft model.", exists=True, file_okay=False),
) -> bool:
    """Train a draft model to propose several tokens in one forward, for `--draft model:OUT,streams=2`.

    paceline train streams smollm2 --draft build/draft --data answers.jsonl --out build/streams

    At the end the draft is measured on held-out answers against the target, and its streams against the draft."""
    return train_streams(setup.training(config), draft, config)
