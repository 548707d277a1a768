"""A data set on disk: the layout that the paper's release has, and beside it what its readers have to guess.

    OUT/<subset>/image2text.json, text2image.json, images/00012_3.png      as released: query, keys, label
    OUT/cases.jsonl      every case: objects, values, captions, boxes, licences
    OUT/build.json       what makes the same bytes again
    OUT/plain/pairs.jsonl, OUT/classes/pairs.jsonl                         pictures with plain captions
    OUT/contact.png      one case of each subset, to look at

    build(Plan(seed=1), {"count": 500}, Path("build/spec"))

Runs in several processes, and goes on where it was interrupted: a picture appears whole or not at all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.engine import PLAIN, Case, Plan, compose, render
from paceline.evals.vision.seeds import child
from paceline.jsonl import write_whole

MANIFEST, CASES, PAIRS, CONTACT = "build.json", "cases.jsonl", "pairs.jsonl", "contact.png"
COMPRESSION = 1
"""Level of the PNGs: 3 takes twice the time for a tenth of the bytes."""
CHUNK = 100
"""Pictures that a process draws at a time, about."""
ALONE = 400
"""Pictures up to which starting processes costs more than it saves."""

Advance = Callable[[int], None]


def build(
    plan: Plan, cases: Mapping[str, int], out: Path, *, workers: int = 0, progress: Advance = lambda pictures: None
) -> int:
    """Write `cases` of each subset below `out`; returns the number of pictures drawn (0: all were there).

    Raises PacelineError if `out` holds something else, or another build."""
    for subset in cases:  # what cannot be drawn is said before anything is written
        compose(plan, subset, 0)
    _claim(out, {**plan.facts(), "cases": dict(cases)})
    chunks: list[tuple[Plan, str, Sequence[int], Path]] = []
    for subset, number in cases.items():
        if not number:
            continue
        _folder(out / subset / "images")
        step = max(1, CHUNK // len(compose(plan, subset, 0).values))
        chunks += [(plan, subset, range(i, min(i + step, number)), out) for i in range(0, number, step)]
    drawn = 0
    for pictures, new in _run(chunks, workers or os.cpu_count() or 1):
        drawn += new
        progress(pictures)
    for subset, number in cases.items():
        if number:
            _index(plan, subset, number, out)
    described = [
        case.facts(plan) for subset, n in cases.items() if subset not in PLAIN for case in _cases(plan, subset, n)
    ]
    if described:
        _write_lines(out / CASES, described)
    contact_sheet(plan, [subset for subset, number in cases.items() if number]).save(out / CONTACT)
    return drawn


def _claim(out: Path, facts: dict[str, Any]) -> None:
    """Make `out` the folder of this build."""
    manifest = out / MANIFEST
    _folder(out)
    if manifest.exists():
        before = json.loads(manifest.read_text("utf-8"))
        other = [key for key in facts if before.get(key) != facts[key]]
        if other:
            said = ", ".join(f"{key} {before.get(key)!r}, not {facts[key]!r}" for key in other)
            raise PacelineError(f"{out} holds another build ({said}): choose another folder, or delete it")
    elif any(out.iterdir()):
        raise PacelineError(f"{out} is not empty and no build: choose another folder")
    else:
        write_whole(manifest, json.dumps(facts, indent=1) + "\n")


def _run(chunks: Sequence[tuple[Plan, str, Sequence[int], Path]], workers: int) -> Any:
    """(pictures, newly drawn) of each chunk as it is finished."""
    if sum(len(chunk[2]) for chunk in chunks) * 5 <= ALONE or workers == 1:
        yield from map(_draw, chunks)
        return
    # Forked processes would inherit locks of libraries that run threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(_draw, chunks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _draw(chunk: tuple[Plan, str, Sequence[int], Path]) -> tuple[int, int]:
    """The pictures of some cases, and how many of them were not there yet."""
    plan, subset, numbers, out = chunk
    pictures = new = 0
    for case in _cases(plan, subset, numbers):
        files = [out / subset / case.image(i) for i in range(len(case.values))]
        pictures += len(files)
        if all(file.exists() for file in files):
            continue
        for file, picture in zip(files, render(plan, case), strict=True):
            draft = file.with_suffix(".part")
            picture.save(draft, "PNG", compress_level=COMPRESSION)
            draft.replace(file)
        new += len(files)
    return pictures, new


def _cases(plan: Plan, subset: str, numbers: int | Sequence[int]) -> list[Case]:
    return [compose(plan, subset, n) for n in (range(numbers) if isinstance(numbers, int) else numbers)]


def _index(plan: Plan, subset: str, number: int, out: Path) -> None:
    """The files that say which caption belongs to which picture."""
    cases = _cases(plan, subset, number)
    if subset in PLAIN:
        pairs = [
            {"image": case.image(0), "caption": case.captions[0], "objects": [thing.name for thing in case.things]}
            for case in cases
        ]
        _write_lines(out / subset / PAIRS, pairs)
        return
    queries: dict[str, list[dict[str, Any]]] = {"image2text": [], "text2image": []}
    for case in cases:
        images = [case.image(i) for i in range(len(case.values))]
        for name, asked, keys in (("image2text", images, case.captions), ("text2image", case.captions, images)):
            for i, query in enumerate(asked):
                order = child(plan.seed, plan.split, subset, case.number, name, i).permutation(len(keys)).tolist()
                queries[name].append({"query": query, "keys": [keys[k] for k in order], "label": order.index(i)})
    for name, listed in queries.items():
        write_whole(out / subset / f"{name}.json", json.dumps(listed, indent=0, ensure_ascii=False))


def contact_sheet(plan: Plan, subsets: Sequence[str], side: int = 128, per_subset: int = 2) -> Image.Image:
    """The first cases of each subset, a row each."""
    rows = [render(plan, compose(plan, subset, n)) for subset in subsets for n in range(per_subset)]
    sheet = Image.new("RGB", (max(map(len, rows)) * (side + 4) + 4, len(rows) * (side + 4) + 4), "white")
    for r, pictures in enumerate(rows):
        for i, picture in enumerate(pictures):
            small = picture.resize((side, side), Image.Resampling.LANCZOS)
            sheet.paste(small, (4 + i * (side + 4), 4 + r * (side + 4)))
    return sheet


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PacelineError(f"{path} cannot be made: {error.strerror}") from error


def _write_lines(file: Path, objects: Sequence[dict[str, Any]]) -> None:
    write_whole(file, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects))
