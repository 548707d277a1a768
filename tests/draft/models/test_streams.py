"""Streams: several tokens a draft forward, that are the model's own wherever it has run them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests import native
from tests.draft.answered import target_and_close_draft
from tests.draft.drafting import DraftTable, OnModel, Replaying, like
from tests.fakes import TableTarget
from tests.lossless_enumeration import largest_difference, speculative
from tests.lossless_enumeration import plain as plainly
from transformers import AutoModelForCausalLM

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft.methods.model import StreamedConfig
from paceline.draft.models.draft_model import Draft, TextModel
from paceline.draft.models.streams import FILE, Streams, open_streams
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.target.load import load
from paceline.train.draft import StreamsLoss

TEXTS = ["the cat and the dog", "there was", "and then the little cat said: hello the cat"]
COUNT, LAYERS, RANK = 2, 2, 4


class StreamTable(DraftTable):
    """A table that runs nodes again where guesses lay that did not stand."""

    def _check(self, segment: Segment) -> None:
        before = self._before.get(segment.slot)
        if segment.start and before is not None:
            self._before[segment.slot] = Segment(
                segment.slot, before.tokens[: segment.start], before.parent[: segment.start]
            )
        super()._check(segment)


class WithStreams(OnModel):
    """A table as a draft model, with `guesser` for its streams: stream j says what the guesser would after the tokens
    so far and j times token 0."""

    def __init__(self, network: TableTarget, guesser: TableTarget, count: int, **options):
        super().__init__(network, StreamedConfig(checkpoint="given", streams=count, **options))
        self.guesser, self.num_streams = guesser, count

    def open(self, target: TableTarget) -> TextModel:
        count = self.num_streams
        return TextModel(self.network, target.vocab_size, run=self.run if count else None, num_streams=count)

    def run(self, drafts: Sequence[Draft], segments: Sequence[Segment]) -> torch.Tensor:
        own, guesses = self.network.verify(segments).logits, []
        for segment in segments:
            paths = self.network._paths(Segment(segment.slot, segment.tokens, segment.parent))
            guesses += [self._guesses(path) for path in paths[len(paths) - segment.num_logits :]]
        return torch.cat([own[:, None], torch.stack(guesses)], 1)

    def _guesses(self, path: list[int]) -> torch.Tensor:
        steps = range(1, self.num_streams + 1)
        return torch.stack([self.guesser.logits_after([*path, *[0] * j]) for j in steps])


def streaming(target: TableTarget, count: int = 1, noise: float = 1.0, **options) -> WithStreams:
    table = like(target, noise)
    made = StreamTable(table.vocab_size, order=table.order, logits=table._logits, max_context=table.max_context)
    return WithStreams(made, like(target, 1.0, seed=7), count, **options)


# Lossless ------------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 3, "order": 1, "scale": 1.5}
WARPED = {
    "as it is": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.7, top_k=2),
    "penalised": SamplingParams(temperature=1.3, repetition_penalty=1.4),
}


FIXED, SVIP = {"stop": "fixed", "draft": 3}, {"stop": "svip", "threshold": 0.38}


@pytest.mark.parametrize(("options", "warped"), [(FIXED, "as it is"), (FIXED, "filtered"), (SVIP, "penalised")])
def test_every_answer_has_the_targets_probability(options, warped):
    """By enumeration: guesses that stand, guesses that are replaced, and guesses that end a window."""
    target, params = TableTarget(seed=3, **SMALL), WARPED[warped]
    made = streaming(target, **options)
    law = speculative(target, [1], params, Replaying(made, target, params), 3)
    assert largest_difference(law, plainly(target, [1], params, 3)) < 1e-9


def test_windows_are_the_models_own_with_fewer_forwards():
    """A rule that ends a window at what the model says: no guess is left in it, so the windows are the same ones."""
    target, random = TableTarget(vocab_size=8, order=2, seed=4, scale=4.0), np.random.default_rng(0)
    texts = [random.integers(0, 8, 5).tolist() for _ in range(30)]
    windows, calls = {}, {}
    for count in (0, 1, 2, 4):
        made = streaming(target, count, 0.5, stop="svip", threshold=0.35)
        made.guesser = target  # of order 2: guesses after a wrong token are others
        made.bind(target)
        trees = []
        for text in texts:
            row = Row(0, text, SamplingParams(max_tokens=200), max_context=1 << 20)
            made.start(row)
            trees += made.propose([row])
            made.drop(row)
        windows[count], calls[count] = [tree.tokens.tolist() for tree in trees], sum(tree.calls for tree in trees)
    ended = [i for i, window in enumerate(windows[0]) if len(window) < 41]  # a full one ends with guesses
    assert all(windows[count][i] == windows[0][i] for count in windows for i in ended)
    assert max(len(windows[0][i]) for i in ended) > 4
    assert calls[4] <= calls[2] <= calls[1] < calls[0]


# A model with streams ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a draft model nearly the same with random streams in its last two layers."""
    at = tmp_path_factory.mktemp("models")
    made = target_and_close_draft(at, 0.03)
    generator = torch.Generator().manual_seed(0)
    size = native.TINY["hidden_size"]
    sizes = {"down": (RANK, size), "up": (size, RANK), "embedding": (COUNT, size)}
    save_file({k: torch.randn(of, generator=generator) for k, of in sizes.items()}, made["close"] / FILE)
    config = json.loads((made["close"] / "config.json").read_text())
    (made["close"] / "config.json").write_text(json.dumps(config | {"streams": {"layers": LAYERS}}))
    return made


def trained(folders: dict[str, Path]) -> StreamsLoss:
    """The draft model and its streams as they are trained."""
    from safetensors.torch import load_file

    network = AutoModelForCausalLM.from_pretrained(folders["close"], dtype=torch.float32)
    module = StreamsLoss(network, COUNT, LAYERS, RANK)
    module.load_state_dict(load_file(folders["close"] / FILE), strict=False)
    return module.eval()


def opened(folders: dict[str, Path], count: int = COUNT) -> Streams:
    return open_streams(str(folders["close"]), load(folders["close"], dtype="float32", device="cpu"), count)


@pytest.mark.parametrize("count", [1, COUNT])
def test_they_run_as_they_were_trained(folders, count):
    """Two rows in one forward, after keys and values of others: logits of training, of tokens and of their streams."""
    streams, ids = opened(folders, count), torch.from_numpy(np.random.default_rng(0).integers(2, 280, (2, 12)))
    with torch.no_grad():
        module = trained(folders)
        expected = module.teacher.lm_head(module.states(ids))[:, : 1 + count].transpose(1, 2)
    slots = [streams.model.add_row(20) for _ in ids]
    for slot, row in zip(slots, ids, strict=True):
        streams.run([Segment.chunk(slot, row[:5].numpy(), last=True)])  # streams of it are no part of the row
        streams.model.commit(slot, range(5))
    above = np.arange(-1, 6)
    rest = [Segment(slot, row[5:].numpy(), above, num_logits=3) for slot, row in zip(slots, ids, strict=True)]
    logits = streams.run(rest)
    torch.testing.assert_close(logits, expected[:, 9:].flatten(0, 1), atol=1e-4, rtol=1e-4)


def answered(folders: dict[str, Path], spec: str, params: SamplingParams, **options):
    return Engine(str(folders["target"]), spec.format(**folders), dtype="float32", device="cpu", **options).generate(
        TEXTS, params
    )


@pytest.mark.parametrize("spec", [
    "model:{close},streams=2,stop=fixed", "model:{close},streams=1,stop=svip", "model:{close},streams=2,context=4",
    "mirror:model:{close},streams=2,where=line", "mirror:model:{close},streams=2,stop=svip,where=line,source=both",
    "sam,min_match=1+model:{close},streams=2",
])  # fmt: skip
def test_any_answer_is_plain_decodings(folders, spec):
    params = SamplingParams(max_tokens=20)
    alone = [done.tokens for done in answered(folders, "none", params)]
    out = answered(folders, spec, params, max_batch=2)
    assert [done.tokens for done in out] == alone
    assert sum(done.stats.draft_tokens for done in out) > 0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("model:{close},streams=3", "streams is 3"),
        ("model:{target},streams=1", "has no streams"),
        ("model:{close},streams=1,tree=4", "draft chains"),
    ],
)
def test_refusals(folders, spec, says):
    with pytest.raises(MethodError, match=says):
        Engine(str(folders["target"]), spec.format(**folders), dtype="float32", device="cpu")
