"""Write builds: data sets on disk, in the layout of the paper's release, with facts that the release lacks.

    OUT/<subset>/image2text.json, text2image.json, images/00012_3.png      as released: query, keys, label
    OUT/cases.jsonl      every case: objects, values, captions, boxes, licences
    OUT/build.json       what makes the same bytes again
    OUT/plain/pairs.jsonl, OUT/classes/pairs.jsonl                         pictures with plain captions
    OUT/contact.png      two cases of each subset, to look at

    build(BuildOptions(seed=1), {"count": 500}, Path("build/spec"))

Runs in several processes, and goes on where it was interrupted: a picture appears whole or not at all."""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import child
from paceline.evals.vision.engine import PLAIN, Composition, build_facts, compose, render
from paceline.evals.vision.options import BuildOptions
from paceline.outputs import write_json, write_whole
from paceline.runs.runs import check_identity

MANIFEST, CASES, PAIRS, CONTACT = "build.json", "cases.jsonl", "pairs.jsonl", "contact.png"
COMPRESSION = 1  # level of the PNGs: 3 takes twice the time for a tenth of the bytes
CHUNK = 100  # A process draws about so many pictures at a time.
ALONE = 80  # Up to so many cases, starting processes costs more than it saves.
CONTACT_SIDE, CONTACT_GAP, CONTACT_CASES = 128, 4, 2
"""Of the contact sheet: pixels of a picture and between two, and cases of each subset."""

Chunk = tuple[BuildOptions, str, range, Path]


def build(
    options: BuildOptions, cases: Mapping[str, int], out: Path, *, workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:  # fmt: skip
    """Write `cases` of each subset below `out`; returns the number of pictures drawn, 0 if all were there.

    workers: processes; 0 is one for each core. Raises PacelineError if `out` holds something else, or another build."""
    firsts = {subset: compose(options, subset, 0) for subset in cases}  # Errors come before anything is written.
    _claim(out, {**build_facts(options), "cases": dict(cases)})
    cases = {subset: number for subset, number in cases.items() if number}
    chunks: list[Chunk] = []
    for subset, number in cases.items():
        (out / subset / "images").mkdir(parents=True, exist_ok=True)
        step = max(1, CHUNK // len(firsts[subset].values))
        chunks += [(options, subset, range(i, min(i + step, number)), out) for i in range(0, number, step)]
    done = drawn = 0
    total = sum(number * len(firsts[subset].values) for subset, number in cases.items())
    for pictures, new in _draw_all(chunks, workers or os.cpu_count() or 1):
        done, drawn = done + pictures, drawn + new
        progress(done, total)
    described = []
    for subset, number in cases.items():
        composed = [compose(options, subset, n) for n in range(number)]
        if subset in PLAIN:
            write_whole(out / subset / PAIRS, _lines(case.pair for case in composed))
        else:
            _write_queries(options, composed, out / subset)
            described += [case.facts(options) for case in composed]
    if described:
        write_whole(out / CASES, _lines(described))
    contact_sheet(options, cases).save(out / CONTACT)
    return drawn


def _claim(out: Path, facts: dict[str, Any]) -> None:
    """Make `out` the folder of this build."""
    manifest = out / MANIFEST
    out.mkdir(parents=True, exist_ok=True)
    if manifest.exists():
        check_identity(json.loads(manifest.read_text("utf-8")), facts, str(out), "choose another folder, or delete it")
    elif any(out.iterdir()):
        raise PacelineError(f"{out} is not empty and no build: choose another folder")
    else:
        write_json(manifest, facts)


def _draw_all(chunks: Sequence[Chunk], workers: int) -> Iterator[tuple[int, int]]:
    """(pictures, newly drawn) of each chunk as it is finished."""
    if sum(len(numbers) for _, _, numbers, _ in chunks) <= ALONE or workers == 1:
        yield from map(_draw, chunks)
        return
    # Forked processes would inherit locks of libraries that run threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(_draw, chunks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _draw(chunk: Chunk) -> tuple[int, int]:
    """Draw some cases; returns the number of their pictures, and of those that were not there yet."""
    options, subset, numbers, out = chunk
    pictures = new = 0
    for case in (compose(options, subset, n) for n in numbers):
        files = [out / subset / image for image in case.images]
        pictures += len(files)
        if all(file.exists() for file in files):
            continue
        for file, picture in zip(files, render(options, case), strict=True):
            draft = file.with_suffix(".part")
            picture.save(draft, "PNG", compress_level=COMPRESSION)
            draft.replace(file)
        new += len(files)
    return pictures, new


def _write_queries(options: BuildOptions, cases: Iterable[Composition], folder: Path) -> None:
    """The released files: which caption belongs to which picture, the keys of each query in an order of its own."""
    queries: dict[str, list[dict[str, Any]]] = {"image2text": [], "text2image": []}
    for case in cases:
        ways = ("image2text", case.images, case.captions), ("text2image", case.captions, case.images)
        for name, asked, keys in ways:
            for i, query in enumerate(asked):
                rng = child(options.seed, options.split, case.subset, case.number, name, i)
                order = rng.permutation(len(keys)).tolist()
                queries[name].append({"query": query, "keys": [keys[k] for k in order], "label": order.index(i)})
    for name, listed in queries.items():
        write_whole(folder / f"{name}.json", json.dumps(listed, indent=0, ensure_ascii=False))


def contact_sheet(options: BuildOptions, subsets: Iterable[str]) -> Image.Image:
    """The first cases of each subset, a row each."""
    rows = [render(options, compose(options, subset, n)) for subset in subsets for n in range(CONTACT_CASES)]
    step = CONTACT_SIDE + CONTACT_GAP
    sheet = Image.new("RGB", (max(map(len, rows)) * step + CONTACT_GAP, len(rows) * step + CONTACT_GAP), "white")
    for r, pictures in enumerate(rows):
        for i, picture in enumerate(pictures):
            small = picture.resize((CONTACT_SIDE, CONTACT_SIDE), Image.Resampling.LANCZOS)
            sheet.paste(small, (CONTACT_GAP + i * step, CONTACT_GAP + r * step))
    return sheet


def _lines(objects: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)
