"""Scores of a model for every case of a data set: the K x K matrices that all figures come from.

    scored = score(model, read_data(folder))
    scored.matrices["count/00012"]

Both directions read the same matrix, so each picture and each distinct caption is encoded once, where the official
evaluation encodes every picture again for each of its K queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.dataset import Case, Data
from paceline.evals.vision.scores import overall, summarise
from paceline.evals.vision.words import VALUES

Vectors = NDArray[np.floating[Any]]
BATCH = 64


@runtime_checkable
class DualEncoder(Protocol):
    """Pictures and captions become vectors; a pair's score is their product."""

    def encode_images(self, pictures: Sequence[Image.Image]) -> Vectors:
        """(n, d)."""
        ...

    def encode_texts(self, captions: Sequence[str]) -> Vectors:
        """(n, d)."""
        ...


@runtime_checkable
class PairScorer(Protocol):
    """Reads a picture and a caption together."""

    def pair_scores(self, pictures: Sequence[Image.Image], captions: Sequence[str]) -> Vectors:
        """(pictures, captions)."""
        ...


@runtime_checkable
class CaseScorer(Protocol):
    """Looks at no picture: it knows the answer, or does not care."""

    def case_scores(self, case: Case) -> Vectors:
        """(K, K): picture by caption."""
        ...


Model = DualEncoder | PairScorer | CaseScorer


@dataclass
class Scored:
    """The matrix of each case that could be scored, by "subset/id", and what was wrong with the others."""

    data: Data
    matrices: dict[str, Vectors] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def of(self, subset: str) -> list[tuple[Case, Vectors]]:
        return [(c, self.matrices[name(c)]) for c in self.data.cases if c.subset == subset and name(c) in self.matrices]

    def results(self, ties: str = "shared") -> list[dict[str, Any]]:
        """The figures of each subset with a case that was scored. ties: "shared", or "first" key as officially."""
        results = []
        for subset, values in VALUES.items():
            scored = self.of(subset)
            if scored:
                cases, matrices = zip(*scored, strict=True)
                orders = [(case.i2t_keys, case.t2i_keys) for case in cases] if ties == "first" else None
                known = values if all(case.facts.get("values") == list(values) for case in cases) else ()
                results.append(summarise(subset, matrices, known, orders=orders))
        return results

    def overall(self, ties: str = "shared") -> dict[str, float]:
        return overall(self.results(ties))


def name(case: Case) -> str:
    return f"{case.subset}/{case.id}"


def score(
    model: Model, data: Data, *, batch: int = BATCH, progress: Callable[[int], None] = lambda cases: None
) -> Scored:
    """The matrices of all cases. A case with a picture that cannot be read is a problem, and the others are scored."""
    scored = Scored(data, problems=list(data.problems))
    if isinstance(model, CaseScorer):
        for case in data.cases:
            scored.matrices[name(case)] = model.case_scores(case)
        progress(len(data.cases))
    elif isinstance(model, DualEncoder):
        _score_dual(model, scored, batch, progress)
    else:
        for case in data.cases:
            pictures = _pictures(scored, case)
            if pictures is not None:
                scored.matrices[name(case)] = model.pair_scores(pictures, case.captions)
            progress(1)
    return scored


def _score_dual(model: DualEncoder, scored: Scored, batch: int, progress: Callable[[int], None]) -> None:
    captions = list(dict.fromkeys(caption for case in scored.data.cases for caption in case.captions))
    texts: dict[str, Vectors] = {}
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        texts.update(zip(part, model.encode_texts(part), strict=True))
    waiting: list[tuple[Case, list[Image.Image]]] = []

    def encode() -> None:
        if not waiting:
            return
        vectors = model.encode_images([picture for _, pictures in waiting for picture in pictures])
        for case, pictures in waiting:
            own, vectors = vectors[: len(pictures)], vectors[len(pictures) :]
            scored.matrices[name(case)] = own @ np.stack([texts[caption] for caption in case.captions]).T
        progress(len(waiting))
        waiting.clear()

    for case in scored.data.cases:
        pictures = _pictures(scored, case)
        if pictures is None:
            progress(1)
            continue
        waiting.append((case, pictures))
        if sum(len(pictures) for _, pictures in waiting) >= batch:
            encode()
    encode()


def _pictures(scored: Scored, case: Case) -> list[Image.Image] | None:
    """The case's pictures, or None and a problem."""
    try:
        return [scored.data.picture(image) for image in case.images]
    except PacelineError as error:
        scored.problems.append(f"{name(case)}: {error}")
        return None
