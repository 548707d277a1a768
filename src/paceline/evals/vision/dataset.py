"""Data sets in the released layout, ours and the official one, as cases of K pictures and K captions.

    data = read_data(Path("build/spec"))        # a folder, or a .zip of one
    data.cases, data.problems                   # what is broken is named; the other cases stand
    data.picture(case.images[0])                # RGB, from the folder or straight from the archive

The release has no case ids. Pictures belong to one case alone, so the text2image queries that share a set of pictures
are a case; captions may occur in several cases ("a photo of two dogs" twice), so image2text queries cannot be grouped
by theirs. cases.jsonl, where it exists, adds values, boxes and names.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.words import VALUES


@dataclass(frozen=True)
class Case:
    """Picture i belongs to caption i."""

    id: str
    subset: str
    images: tuple[str, ...]
    """Paths below the data set's folder."""
    captions: tuple[str, ...]
    i2t_keys: NDArray[np.int64]
    """(K, K): row i is the order in which picture i's query lists the captions."""
    t2i_keys: NDArray[np.int64]
    """(K, K): row i is the order in which caption i's query lists the pictures."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The case's line of cases.jsonl; empty if there is none."""

    @property
    def k(self) -> int:
        return len(self.images)


@dataclass
class Data:
    """Cases, and a line for each thing that was wrong."""

    source: Path
    files: Files
    cases: list[Case]
    problems: list[str]

    def picture(self, name: str) -> Image.Image:
        return self.files.picture(name)


class Files:
    """The files of a data set, in a folder or in a .zip."""

    def __init__(self, source: Path):
        self.archive: zipfile.ZipFile | None = None
        self.root = source
        self._prefix = ""
        if source.is_file():
            try:
                self.archive = zipfile.ZipFile(source)
            except (OSError, zipfile.BadZipFile) as error:
                raise PacelineError(
                    f"{source} is not a readable zip ({error}): download it again, or name a folder"
                ) from error
            self._names = set(self.archive.namelist())
            self._prefix = _common_folder(self._names)
        elif not source.is_dir():
            raise PacelineError(f"there is no data set at {source}: build one with paceline eval vision build {source}")

    def exists(self, name: str) -> bool:
        return self._prefix + name in self._names if self.archive else (self.root / name).is_file()

    def read(self, name: str) -> bytes:
        """Raises OSError or BadZipFile."""
        return self.archive.read(self._prefix + name) if self.archive else (self.root / name).read_bytes()

    def picture(self, name: str) -> Image.Image:
        """RGB; raises PacelineError with one line that says what is wrong with the file."""
        try:
            with Image.open(BytesIO(self.read(name))) as opened:
                picture = opened.convert("RGB")
        except (KeyError, FileNotFoundError):
            raise PacelineError(f"{name} is missing") from None
        except (OSError, zipfile.BadZipFile, SyntaxError) as error:
            raise PacelineError(f"{name} cannot be read as a picture: {error}") from error
        if picture.width != picture.height:
            size = f"{picture.width} x {picture.height}"
            raise PacelineError(f"{name} is {size}, not square: cropping would move and enlarge what it shows")
        return picture


def _common_folder(names: set[str]) -> str:
    """What stands before "<subset>/" in an archive's names, "data/" for one."""
    for name in sorted(names):
        for subset in VALUES:
            place = name.find(f"{subset}/text2image.json")
            if place >= 0:
                return name[:place]
    return ""


def read_data(source: Path, subsets: Sequence[str] = ()) -> Data:
    """The cases of some subsets, all that are there by default.

    Raises PacelineError if there is no data set, or none of the subsets asked for."""
    files = Files(source)
    there = [subset for subset in VALUES if files.exists(f"{subset}/text2image.json")]
    lacking = [subset for subset in subsets if subset not in there]
    if lacking or not there:
        raise PacelineError(
            f"{source} has no subset {', '.join(lacking) or 'at all'}; there is {', '.join(there) or 'nothing'}"
            " (a subset is a folder with image2text.json and text2image.json)"
        )
    data = Data(source, files, [], [])
    described = _descriptions(files, data.problems)
    for subset in subsets or there:
        _read_subset(data, subset, described)
    return data


def _read_subset(data: Data, subset: str, described: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    to_image = _queries(data, subset, "text2image")
    to_text = {q["query"]: q for q in _queries(data, subset, "image2text")}
    groups: dict[frozenset[str], list[dict[str, Any]]] = {}
    for query in to_image:
        groups.setdefault(frozenset(query["keys"]), []).append(query)
    sizes = [len(group) for group in groups.values()]
    usual = max(set(sizes), key=sizes.count) if sizes else 0
    for number, (pictures, group) in enumerate(groups.items()):
        where = f"{subset}, case with {min(pictures)}"
        try:
            case = _case(subset, group, to_text, usual, described)
        except PacelineError as error:
            data.problems.append(f"{where}: {error}")
            continue
        missing = [name for name in case.images if not data.files.exists(name)]
        if missing:
            data.problems.append(f"{where}: {', '.join(missing)} missing")
        else:
            data.cases.append(case if case.facts else _named(case, f"{number:05d}"))


def _named(case: Case, name: str) -> Case:
    return Case(name, case.subset, case.images, case.captions, case.i2t_keys, case.t2i_keys, case.facts)


def _case(
    subset: str,
    group: list[dict[str, Any]],
    to_text: Mapping[str, dict[str, Any]],
    usual: int,
    described: Mapping[tuple[str, str], Mapping[str, Any]],
) -> Case:
    """A case from the text2image queries that share its pictures; PacelineError says what does not fit."""
    k = len(group[0]["keys"])
    if len(group) != k or k != usual:
        raise PacelineError(f"{len(group)} captions for {k} pictures, where cases of {subset} have {usual} of each")
    by_image = {query["keys"][query["label"]]: query for query in group}
    if len(by_image) != k:
        raise PacelineError("two captions have the same picture as their label")
    facts = described.get((subset, min(by_image)), {})
    images = tuple(facts.get("images", sorted(by_image)))
    if set(images) != set(by_image):
        raise PacelineError("cases.jsonl lists other pictures")
    captions = tuple(by_image[image]["query"] for image in images)
    i2t = []
    for image, caption in zip(images, captions, strict=True):
        query = to_text.get(image)
        if query is None:
            raise PacelineError(f"{image} is no query of image2text.json")
        if sorted(query["keys"]) != sorted(captions) or query["keys"][query["label"]] != caption:
            raise PacelineError(f"image2text.json and text2image.json disagree on {image}")
        i2t.append([captions.index(key) for key in query["keys"]])
    t2i = [[images.index(key) for key in by_image[image]["keys"]] for image in images]
    paths = tuple(f"{subset}/{image}" for image in images)
    return Case(facts.get("case", ""), subset, paths, captions, np.array(i2t), np.array(t2i), facts)


def _queries(data: Data, subset: str, name: str) -> list[dict[str, Any]]:
    """The well-formed queries of a file; the others become problems."""
    file = f"{subset}/{name}.json"
    try:
        listed = json.loads(data.files.read(file))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        data.problems.append(f"{file} cannot be read: {error}")
        return []
    kept = []
    for i, query in enumerate(listed):
        wrong = _wrong(query)
        if wrong:
            data.problems.append(f"{file}, query {i}: {wrong}")
        else:
            kept.append(query)
    return kept


def _wrong(query: Any) -> str:
    """What is wrong with a query; "" if nothing."""
    if (
        not isinstance(query, dict)
        or not isinstance(query.get("query"), str)
        or not isinstance(query.get("keys"), list)
    ):
        return "not an object with query, keys and label"
    label, keys = query.get("label"), query["keys"]
    if not isinstance(label, int) or not 0 <= label < len(keys):
        return f"label {label!r} is out of range: there are {len(keys)} keys"
    return "a key occurs twice" if len(set(keys)) != len(keys) else ""


def _descriptions(files: Files, problems: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Lines of cases.jsonl by subset and first picture in order of names."""
    if not files.exists("cases.jsonl"):
        return {}
    lines = {}
    for number, line in enumerate(files.read("cases.jsonl").decode("utf-8").splitlines(), 1):
        try:
            facts = json.loads(line)
            lines[facts["subset"], min(facts["images"])] = facts
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"cases.jsonl, line {number}: {error}")
    return lines
