"""Streams: a draft model learns to say several tokens a forward (Speculative Streaming).

Bhendawade et al. 2024 (arXiv 2402.11131), as Mirror-SD uses it on the draft (arXiv 2510.13161). In the draft's last
layers every token t has `count` more states beside its own, its streams. Stream j begins as the token's state M_t
through a low-rank projection, plus what marks its number, sees the tokens up to t and the streams 1..j of t, and is
read by the draft's own head as the token j places further on than what t itself says. The loss is the sheet of
cross-entropies

    a_0 CE(M_t, y_{t+1}) + sum_j a_j CE(S_{t,j}, y_{t+1+j}),    a_j = 1, 1/2, 1/4, ...

on the target's own answers. Tokens never see streams, so the folder that is written is a draft model like any other
with a file of streams beside its weights. With `keep` the draft itself stays as it is, and the streams alone learn.

Where we differ: the projection is added to the state and begins at 0, so that a stream begins as its token.

Doesn't know: how drafts are made or verified.

    paceline train streams models/demo --draft models/demo-draft --data answers.jsonl --out build/streams
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from paceline.draft.neural.checkpoint import save_tensors
from paceline.draft.neural.streams import FILE, KEY
from paceline.errors import PacelineError
from paceline.jsonl import loads, write_whole
from paceline.target.load import SMALL_FILES, find
from paceline.train import options
from paceline.train.agreement import agreement, lines, logits_of, overlaps
from paceline.train.data import Rows, batches
from paceline.train.drafter import Lesson, LessonConfig, open_teacher
from paceline.train.loss import IGNORE, autocast_dtype, chunked_cross_entropy
from paceline.train.plan import LoopConfig

PASSES = 3
"""Over the answers, where no budget is given: the draft knows the language already."""


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(LessonConfig):
    """What is added to a draft model, and what a batch is made of. layers: the last ones, that run streams."""

    count: int = 2
    layers: int = 1
    rank: int = 32
    keep: bool = False
    length: int = 128


class StreamsLoss(nn.Module):
    """A draft model with streams whose forward is its loss. input_ids, labels [B, T], labels shifted.

    draft: a transformers model of the Llama kind; `layers` of its layers run `count` streams. keep: freeze it."""

    def __init__(self, draft: Any, count: int, layers: int, rank: int, keep: bool = False) -> None:
        super().__init__()
        size = draft.config.hidden_size
        self.layers = layers
        self.down = nn.Parameter(torch.randn(rank, size) / size**0.5)
        self.up = nn.Parameter(torch.zeros(size, rank))
        self.embedding = nn.Parameter(0.02 * torch.randn(count, size))
        draft.set_attn_implementation("sdpa")  # takes the mask below
        self._kept = [draft.requires_grad_(False)] if keep else []  # in a list: not among the parameters
        self._learnt = None if keep else draft

    @property
    def draft(self) -> Any:
        """The draft model."""
        return self._kept[0] if self._kept else self._learnt

    def states(self, input_ids: Tensor) -> Tensor:
        """What the head reads at every token [B, 1 + count, T, H]: for the next one, then of every stream."""
        model, count, length = self.draft.model, len(self.embedding), input_ids.shape[1]
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
        states = states.to(autocast_dtype(states))
        total = torch.zeros((), device=states.device)
        for j in range(1 if self._kept else 0, states.shape[1]):
            total = total + 0.5**j * chunked_cross_entropy(states[:, j], self.draft.lm_head.weight, later(labels, j))
        return total


def seen(length: int, count: int) -> Tensor:
    """Who sees whom, bool [(1 + count) T, (1 + count) T], tokens first, then their first streams, and so on: all see
    the tokens up to their own, and stream j also the streams 1..j of its token."""
    kind, place = (x.flatten() for x in torch.meshgrid(torch.arange(count + 1), torch.arange(length), indexing="ij"))
    tokens = (kind[None] == 0) & (place[None] <= place[:, None])
    streams = (kind[None] > 0) & (kind[None] <= kind[:, None]) & (place[None] == place[:, None])
    return tokens | streams


def later(labels: Tensor, steps: int) -> Tensor:
    """Labels [B, T] of the tokens `steps` places further on, where every token until then is the target's own."""
    learnt, result = labels != IGNORE, labels
    for _ in range(steps):
        result = nn.functional.pad(result[:, 1:], (0, 1), value=IGNORE)
        learnt = learnt & (result != IGNORE)
    return torch.where(learnt, result, IGNORE)


@torch.no_grad()
def measure(module: StreamsLoss, held: Mapping[str, Rows], batch: int = 4) -> list[dict[str, float]]:
    """For every stream, how its distribution fits what the draft itself says at that place, over the labelled positions
    of `held`: {"overlap", "top1"} as in `agreement.Agreement`."""
    sums, tokens = torch.zeros(len(module.embedding), 2), [0] * len(module.embedding)
    head = module.draft.lm_head
    for ids, labels in (pair for rows in held.values() for pair in batches(rows, batch)):
        main, *streams = (states for states in module.states(ids).unbind(1))
        for j, states in enumerate(streams, 1):
            kept = later(labels, j)[:, :-j] != IGNORE
            p, q = (head(x[kept]).float().softmax(-1) for x in (main[:, j:], states[:, :-j]))
            sums[j - 1] += torch.tensor(overlaps(p, q))
            tokens[j - 1] += len(p)
    return [
        {"overlap": float(overlap) / max(n, 1), "top1": float(top1) / max(n, 1)}
        for (overlap, top1), n in zip(sums, tokens, strict=True)
    ]


def train_streams(
    target: Path, draft: Path, answers: Path, out: Path, run: Path, loop: LoopConfig, config: StreamsConfig
) -> bool:
    """Train streams for the draft model in `draft` on `answers` of `target` (a file of `generated_rows`); writes `out`
    in the draft's own dtype, for `model:OUT,streams=N`. False when interrupted; the same call goes on."""
    network, folder = open_teacher(draft), find(draft, SMALL_FILES)
    dtype = loads((folder / "config.json").read_bytes()).get("dtype") or "float32"
    if not 1 <= config.layers <= network.config.num_hidden_layers:
        raise PacelineError(f"--layers is {config.layers}; {draft} has {network.config.num_hidden_layers}")
    lesson = Lesson.open(target, answers, config)
    if network.config.vocab_size != lesson.teacher.config.vocab_size:
        raise PacelineError(f"{draft} has {network.config.vocab_size} tokens, and {target} has not as many")
    torch.manual_seed(loop.seed)
    module = StreamsLoss(network, config.count, config.layers, config.rank, config.keep)
    if not lesson.train(module, loop, run):
        return False
    if lesson.first:
        module.cpu().eval()
        # Anew: training wraps a module's forward in lower precision.
        teacher, held = lesson.teacher.cpu(), lesson.held
        fits = agreement(logits_of(teacher), logits_of(module.draft), held) if held else []
        streams = measure(module, held) if held else []
        out.mkdir(parents=True, exist_ok=True)
        lesson.tokenizer.inner.save_pretrained(out)
        network.generation_config.save_pretrained(out)
        of = getattr(torch, str(dtype))
        weights = {name: p.to(of) for name, p in module.draft.named_parameters()}  # tied weights once
        save_tensors(out / "model.safetensors", weights, {"format": "pt"})
        own = {name: p.to(of) for name, p in module.named_parameters() if name in ("down", "up", "embedding")}
        save_tensors(out / FILE, own, {"format": "pt"})
        settings = loads((folder / "config.json").read_bytes())
        settings[KEY] = {"layers": config.layers, **lesson.facts("streams", loop, fit=streams)}
        write_whole(out / "config.json", json.dumps(settings, indent=2) + "\n")
        report = [f"stream {j}  as the draft itself {f['overlap']:6.1%}  same best token {f['top1']:6.1%}"
                  for j, f in enumerate(streams, 1)]  # fmt: skip
        lesson.report([*(lines(fits) if fits else []), *report], out)
    return True


@options.with_options
def command(
    setup: options.DrafterOptions,
    draft: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the draft model.")],
    lr: options.Rate = 3e-4,
    count: Annotated[
        int, typer.Option("--streams", help="Streams: tokens a forward says beside the next one.", min=1)
    ] = 2,
    layers: Annotated[int, typer.Option(help="Last layers of the draft, that run streams.", min=1)] = 1,
    rank: Annotated[int, typer.Option(help="Of the projection that begins a stream.", min=1)] = 32,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the draft as it is; the streams alone learn.")] = False,
    rows: options.BatchRows = 16,
) -> bool:
    """Teach a draft model to say several tokens a forward, for `--draft model:OUT,streams=2`.

    paceline train streams models/demo --draft models/demo-draft --data answers.jsonl --out build/streams

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    draft is measured on held-out answers against the target, and its streams against the draft.
    """
    if count < 1:
        raise PacelineError(f"--streams is {count}; it is 1 or more")
    run, answers = setup.prepare()
    loop = setup.loop(answers, PASSES, peak_lr=lr, warmup_steps=20)
    # Rows of more than 128 tokens cost more than they teach: all streams of all tokens see each other's layer.
    config = StreamsConfig(count=count, layers=layers, rank=rank, keep=keep, length=min(setup.length, 128), rows=rows)
    return train_streams(setup.target, draft, answers, setup.out, run, loop, config)
