"""Data sets in the released layout, ours and the official one, as cases of K pictures and K captions; and plain pairs.

The release has no case ids. A picture belongs to one case alone, so the text2image queries that share a set of pictures
are a case; a caption may occur in several cases ("a photo of two dogs" twice), so image2text queries cannot be grouped
by theirs. cases.jsonl, where it exists, adds values, boxes and names."""

import base64
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.captions import VALUES
from paceline.textfiles import objects

Root = Path | zipfile.Path
Query = dict[str, Any]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """Picture i belongs to caption i."""

    id: str
    subset: str
    images: tuple[str, ...]  # paths below the data set's folder
    captions: tuple[str, ...]
    i2t_keys: NDArray[np.int64]  # (K, K): row i is the order in which picture i's query lists the captions
    t2i_keys: NDArray[np.int64]  # (K, K): row i is the order in which caption i's query lists the pictures
    facts: Facts  # the case's line of cases.jsonl; empty if there is none

    @property
    def k(self) -> int:
        return len(self.images)

    @property
    def name(self) -> str:
        return f"{self.subset}/{self.id}"


@dataclass
class Data:
    """Cases, and a line for each thing that was wrong."""

    source: Path
    root: Root  # `source`, or the folder in the archive that is `source`
    cases: list[Case]
    problems: list[str]

    def picture(self, name: str) -> Image.Image:
        """A picture in RGB. Raises PacelineError, one line, if the file is wrong."""
        picture = read_picture(self.root / name).convert("RGB")
        if picture.width != picture.height:
            size = f"{picture.width} x {picture.height}"
            raise PacelineError(f"{name} is {size}, not square: cropping would move and enlarge what it shows")
        return picture

    def pictures(self, case: Case, problems: list[str]) -> list[Image.Image] | None:
        """A case's pictures. If a picture cannot be read, returns None and adds to `problems`."""
        try:
            return [self.picture(image) for image in case.images]
        except PacelineError as error:
            problems.append(f"{case.name}: {error}")
            return None

    def label_counts(self) -> dict[str, dict[str, list[int]]]:
        """How often the right key stands at each place, by subset and direction: whether keys were shuffled."""
        places: dict[str, dict[str, list[int]]] = {}
        for case in self.cases:
            ways = places.setdefault(case.subset, {"i2t": [0] * case.k, "t2i": [0] * case.k})
            for way, keys in (("i2t", case.i2t_keys), ("t2i", case.t2i_keys)):
                for query, order in enumerate(keys.tolist()):
                    ways[way][order.index(query)] += 1
        return places


def read_picture(file: Root) -> Image.Image:
    """Read a picture unchanged. Raises PacelineError, one line, if it cannot be read."""
    try:
        picture = Image.open(BytesIO(file.read_bytes()))
        picture.load()
    except Exception as error:  # decoders raise many kinds
        raise PacelineError(f"{file} cannot be read as a picture: {error or type(error).__name__}") from None
    return picture


def _check_inside(name: str) -> None:
    """Raise PacelineError if a picture's name leaves the data set's folder, because the picture would be sent to the
    model's server."""
    if ".." in (parts := re.split(r"[/\\]", name)) or not parts[0] or ":" in parts[0]:
        raise PacelineError(f"{name!r} is no path below the data set's folder")


def data_url(picture: Image.Image, format: str = "PNG", **settings: Any) -> str:
    """A picture as a data URL; PNG is pixel for pixel."""
    file = BytesIO()
    picture.save(file, format, **(settings or {"compress_level": 1}))
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def values_of(subset: str, cases: Sequence[Case]) -> tuple[str, ...]:
    """The subset's values in order, if cases.jsonl confirms the order; else ()."""
    values = VALUES[subset]
    return values if all(case.facts.get("values") == list(values) for case in cases) else ()


def _open(source: Path) -> Root:
    """Open the folder with the subsets: `source`, or in a .zip,
    where it may be below another folder such as "data/"."""
    if source.is_dir():
        return source
    if not source.is_file():
        raise PacelineError(f"there is no data set at {source}: build one with paceline eval vision build {source}")
    try:
        archive = zipfile.ZipFile(source)
    except (OSError, zipfile.BadZipFile) as error:
        raise PacelineError(f"{source} is not a readable zip ({error}): download it again, or name a folder") from None
    first_files = tuple(f"{subset}/text2image.json" for subset in VALUES)
    found = [name.rsplit("/", 2) for name in archive.namelist() if name.endswith(first_files)]
    return zipfile.Path(archive, min((f"{above[0]}/" for *above, _, _ in found if above), default=""))


def read_data(source: Path, subsets: Sequence[str] = ()) -> Data:
    """The cases of some subsets, all that are there by default.

    Raises PacelineError if there is no data set, or if a subset that is asked for is not there."""
    root = _open(source)
    there = [subset for subset in VALUES if (root / subset / "text2image.json").is_file()]
    lacking = [subset for subset in subsets if subset not in there]
    if lacking or not there:
        raise PacelineError(
            f"{source} has no subset {', '.join(lacking) or 'at all'}; there is {', '.join(there) or 'nothing'}"
            " (a subset is a folder with image2text.json and text2image.json)"
        )
    data = Data(source, root, [], [])
    described = _descriptions(data)
    for subset in subsets or there:
        _read_subset(data, subset, described)
    return data


def _read_subset(data: Data, subset: str, described: Mapping[tuple[str, str], Facts]) -> None:
    to_text = {query["query"]: query for query in _queries(data, subset, "image2text")}
    groups: dict[frozenset[str], list[Query]] = {}
    for query in _queries(data, subset, "text2image"):
        groups.setdefault(frozenset(query["keys"]), []).append(query)
    usual = mode(map(len, groups.values())) if groups else 0
    for number, (pictures, group) in enumerate(groups.items()):
        try:
            if len(group) != len(pictures) or len(group) != usual:
                raise PacelineError(
                    f"{len(group)} captions for {len(pictures)} pictures, where cases of {subset} have {usual} of each"
                )
            case = _case(subset, group, to_text, described.get((subset, min(pictures)), {}), f"{number:05d}")
            if missing := [name for name in case.images if not (data.root / name).is_file()]:
                raise PacelineError(f"{', '.join(missing)} missing")
            data.cases.append(case)
        except PacelineError as error:
            data.problems.append(f"{subset}, case with {min(pictures)}: {error}")


def _case(subset: str, group: list[Query], to_text: Mapping[str, Query], facts: Facts, number: str) -> Case:
    """A case from the text2image queries that share its pictures; PacelineError says what does not fit."""
    by_image = {query["keys"][query["label"]]: query for query in group}
    if len(by_image) != len(group):
        raise PacelineError("two captions have the same picture as their label")
    for image in by_image:
        _check_inside(image)
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
    return Case(facts.get("case", number), subset, paths, captions, np.array(i2t), np.array(t2i), facts)


def _queries(data: Data, subset: str, name: str) -> list[Query]:
    """The well-formed queries of a file; the others become problems."""
    file = f"{subset}/{name}.json"
    try:
        listed = json.loads((data.root / file).read_bytes())
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        data.problems.append(f"{file} cannot be read: {error}")
        return []
    problems = {i: wrong for i, query in enumerate(listed) if (wrong := _wrong(query))}
    data.problems += [f"{file}, query {i}: {wrong}" for i, wrong in problems.items()]
    return [query for i, query in enumerate(listed) if i not in problems]


def _wrong(query: Any) -> str:
    """What is wrong with a query; "" if nothing."""
    match query:
        case {"query": str(), "keys": list(keys), "label": label}:
            if not isinstance(label, int) or not 0 <= label < len(keys):
                return f"label {label!r} is out of range: there are {len(keys)} keys"
            return "a key occurs twice" if len(set(keys)) != len(keys) else ""
    return "not an object with query, keys and label"


def _descriptions(data: Data) -> dict[tuple[str, str], Facts]:
    """Lines of cases.jsonl, by subset and by the picture whose name sorts first."""
    file = data.root / "cases.jsonl"
    if not file.is_file():
        return {}
    lines = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            facts = json.loads(line)
            lines[facts["subset"], min(facts["images"])] = facts
        except (ValueError, KeyError, TypeError) as error:
            data.problems.append(f"cases.jsonl, line {number}: {error}")
    return lines


@dataclass(frozen=True)
class PairFile:
    """Pictures with a caption each."""

    folder: Path
    images: tuple[str, ...]
    captions: tuple[str, ...]

    def picture(self, i: int) -> Image.Image:
        """RGB. Raises PacelineError with one line if the file cannot be read."""
        return read_picture(self.folder / self.images[i]).convert("RGB")


def read_pairs(path: Path) -> PairFile:
    """pairs.jsonl, or the folder that holds it: lines of {"image": path beside the file, "caption": text}."""
    file = path / "pairs.jsonl" if path.is_dir() else path
    pairs = []
    for where, line in objects(str(file), PacelineError, '{"image": ..., "caption": ...}'):
        if not isinstance(line.get("image"), str) or not isinstance(line.get("caption"), str):
            raise PacelineError(f'{where} has no "image" and "caption"')
        _check_inside(line["image"])
        pairs.append((line["image"], line["caption"]))
    if not pairs:
        raise PacelineError(f"{file} holds no pairs")
    images, captions = zip(*pairs, strict=True)
    return PairFile(file.parent, images, captions)
