"""Evaluations: the K x K scores that a model gives the pictures and captions of every case, and a run's report.

Both directions read the same matrix, so each picture and each distinct caption is encoded once, where the official
evaluation encodes every picture again for each of its K queries."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline import __version__
from paceline.errors import PacelineError
from paceline.evals.vision import child
from paceline.evals.vision.ask import ask_all
from paceline.evals.vision.captions import VALUES, holds
from paceline.evals.vision.dataset import Case, Data, read_data, values_of
from paceline.evals.vision.options import EndpointOptions, RunOptions, read_model
from paceline.evals.vision.scores import overall, summarise
from paceline.given import listed
from paceline.net.keys import Keys
from paceline.outputs import write_json

Vectors = NDArray[np.floating[Any]]
Scores = NDArray[np.floating[Any]]
BATCH = 64
REPORT, SCORES = "report.json", "scores.npz"


class DualEncoder(Protocol):
    """Encodes pictures and captions as vectors (n, d); a pair's score is their product."""

    def encode_images(self, pictures: Sequence[Image.Image]) -> Vectors: ...

    def encode_texts(self, captions: Sequence[str]) -> Vectors: ...


Baseline = Callable[[Case], Scores]
"""Looks at no picture; checks a data set and the figures. From a case to (K, K), picture by caption."""


def geometry_scores(case: Case) -> Scores:
    """1 where a caption is true of a picture by the boxes of cases.jsonl, else 0."""
    facts = case.facts
    if "boxes" not in facts:
        raise PacelineError("geometry reads the boxes in cases.jsonl, which this data set does not have")
    a, b = (*facts["objects"], "")[:2]
    true = [
        [holds(case.subset, value, boxes, facts["size"], a, b) for value in facts["values"]] for boxes in facts["boxes"]
    ]
    return np.array(true, float)


BASELINES: dict[str, Baseline] = {
    "oracle": lambda case: np.eye(case.k),
    "geometry": geometry_scores,
    "swapped": lambda case: np.roll(np.eye(case.k), 1, axis=1),  # It takes each value for the next.
    "constant": lambda case: np.ones((case.k, case.k)),  # A collapsed model scores so.
}

Model = DualEncoder | Baseline


def open_model(name: str, options: Any) -> Model:
    """A model that scores pictures and captions, by its name and its options."""
    if name in BASELINES:
        return BASELINES[name]
    if name == "random":
        return lambda case: child(options.seed, case.subset, case.id).random((case.k, case.k))
    from paceline.evals.vision.towers import Towers

    return Towers.load(options.checkpoint, options.device, options.dtype)


@dataclass
class Scored:
    """The matrices of the scored cases, by name, and the problems of the others."""

    data: Data
    matrices: dict[str, Scores] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def cases_of(self, subset: str) -> list[Case]:
        """The cases of a subset that were scored."""
        return [case for case in self.data.cases if case.subset == subset and case.name in self.matrices]

    def results(self, ties: str = "shared") -> list[dict[str, Any]]:
        """The figures of each subset with a case that was scored. ties: "shared", or "first" key as officially."""
        return [
            summarise(
                subset,
                [self.matrices[case.name] for case in cases],
                values_of(subset, cases),
                orders=[(case.i2t_keys, case.t2i_keys) for case in cases] if ties == "first" else None,
            )
            for subset in VALUES
            if (cases := self.cases_of(subset))
        ]


def score(
    model: Model, data: Data, *, batch: int = BATCH, progress: Callable[[int, int], None] = lambda done, total: None
) -> Scored:
    """The matrices of all cases. A case with a picture that cannot be read is a problem, and the others are scored.

    batch: pictures and captions encoded at once."""
    scored = Scored(data, problems=list(data.problems))
    if callable(model):
        scored.matrices = {case.name: model(case) for case in data.cases}
    else:
        _score_dual(model, scored, batch, progress)
    return scored


def _score_dual(model: DualEncoder, scored: Scored, batch: int, progress: Callable[[int, int], None]) -> None:
    captions = list(dict.fromkeys(caption for case in scored.data.cases for caption in case.captions))
    texts: dict[str, Any] = {}
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        texts.update(zip(part, model.encode_texts(part), strict=True))
    waiting: list[tuple[Case, list[Image.Image]]] = []
    for number, case in enumerate(scored.data.cases, 1):
        if (pictures := scored.data.pictures(case, scored.problems)) is not None:
            waiting.append((case, pictures))
        if number == len(scored.data.cases) or sum(len(pictures) for _, pictures in waiting) >= batch:
            together = [picture for _, pictures in waiting for picture in pictures]
            vectors = model.encode_images(together) if together else np.empty((0, 0))
            for own, _ in waiting:
                first, vectors = vectors[: own.k], vectors[own.k :]
                scored.matrices[own.name] = first @ np.stack([texts[caption] for caption in own.captions]).T
            waiting.clear()
        progress(number, len(scored.data.cases))


def run(
    source: Path, asked: RunOptions, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Score the model of the options. Returns the report, which is also written to `asked.out`.

    Raises PacelineError if there is nothing to score."""
    name, options = read_model(asked.model)
    data = read_data(source, listed(asked.subsets))
    if not data.cases:
        raise PacelineError(f"{source} has no whole case; the first problem: {'; '.join(data.problems[:1])}")
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
    if isinstance(options, EndpointOptions):
        keys = replace(asked.keys, api_key_env=options.key) if options.key else asked.keys
        found = _ask(data, options, keys, asked.out, progress)
    else:
        found = _score(data, open_model(name, options), asked, progress)
        if hasattr(options, "checkpoint"):  # `paceline eval vision train` writes the history of a model beside it.
            files = {key: Path(options.checkpoint, f"{key}.json") for key in ("training", "frontier")}
            found |= {key: json.loads(file.read_text("utf-8")) for key, file in files.items() if file.is_file()}
    about = {"data": str(source.resolve()), "model": asked.model, "paceline": __version__, "ties": asked.ties}
    report = about | {"labels": data.label_counts()} | found | {"mean": overall(found["results"])}
    if asked.out is not None:
        write_json(asked.out / REPORT, report)
    return report


def _score(data: Data, model: Model, asked: RunOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    scored = score(model, data, batch=asked.batch, progress=progress)
    if not scored.matrices:
        raise PacelineError(f"no case of {data.source} could be scored; the first problem: {scored.problems[0]}")
    if asked.out is not None:
        np.savez_compressed(asked.out / SCORES, **scored.matrices)  # type: ignore[arg-type]
    settings = {"settings": model.describe()} if hasattr(model, "describe") else {}
    return {**settings, "results": scored.results(asked.ties), "problems": scored.problems}


def _ask(
    data: Data, options: EndpointOptions, keys: Keys, out: Path | None, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    from paceline.evals.vision.ask import figures

    with tempfile.TemporaryDirectory() as scratch:
        replies = asyncio.run(ask_all(data, options, out or Path(scratch), progress, keys))
    results, habits = figures(data, replies, options)
    sizes = {data.picture(case.images[0]).size for case in data.cases[:20]}
    habits |= {"detail": options.detail, "sent": sorted(f"{w} x {h}" for w, h in sizes), "blind": options.blind}
    habits["options"] = {key: value for key, value in asdict(options).items() if key != "key"}
    return {"results": results, "replies": habits, "problems": data.problems}
