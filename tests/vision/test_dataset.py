"""Data sets on disk: written, resumed, read by the official rules, rebuilt without case ids, and broken."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.captions import VALUES
from paceline.evals.vision.dataset import read_data, read_pairs, read_picture
from paceline.evals.vision.evaluate import open_model, score
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.towers import small
from paceline.evals.vision.writer import build

from .sets import data, sample


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(sample(), tmp_path / "copy"))


def load(root, subset):
    """Items as the official data loaders yield them, pictures opened as RGB: an independent reader, written anew from
    the loader's rules. A subset's folder has image2text.json and text2image.json; each query has K keys, texts or paths
    below the folder, and a label; candidates are stacked, so K is one number in a subset."""
    folder = root / subset
    items = {"i2t": [], "t2i": []}
    for query in json.loads((folder / "image2text.json").read_text()):
        picture = Image.open(folder / query["query"]).convert("RGB")
        items["i2t"].append({"query_image": picture, "candidate_texts": query["keys"], "label": query["label"]})
    for query in json.loads((folder / "text2image.json").read_text()):
        pictures = [Image.open(folder / key).convert("RGB") for key in query["keys"]]
        items["t2i"].append({"query_text": query["query"], "candidate_images": pictures, "label": query["label"]})
    return items


def test_the_official_loader_reads_what_we_write():
    lines = [json.loads(line) for line in (sample() / "cases.jsonl").read_text().splitlines()]
    for subset, values in VALUES.items():
        items, k = load(sample(), subset), len(values)
        assert len(items["i2t"]) == len(items["t2i"]) == 4 * k
        right = {}
        for line in (line for line in lines if line["subset"] == subset):
            for image, caption in zip(line["images"], line["captions"], strict=True):
                right[Image.open(sample() / subset / image).convert("RGB").tobytes()] = caption
        for item in items["i2t"]:
            assert (len(item["candidate_texts"]), item["query_image"].size) == (k, (96, 96))
            assert item["candidate_texts"][item["label"]] == right[item["query_image"].tobytes()]
        for item in items["t2i"]:
            assert len(item["candidate_images"]) == k
            assert right[item["candidate_images"][item["label"]].tobytes()] == item["query_text"]


def test_cases_are_rebuilt_without_cases_jsonl(copy):
    with_ids = {(c.subset, frozenset(c.images)): c.captions for c in data().cases}
    (copy / "cases.jsonl").unlink()
    rebuilt = read_data(copy)
    assert not rebuilt.problems
    assert len(rebuilt.cases) == 24
    for case in rebuilt.cases:
        assert with_ids[case.subset, frozenset(case.images)] == case.captions
        assert np.array_equal(score(open_model("oracle", None), rebuilt).matrices[case.name], np.eye(case.k))


def test_equal_captions_in_two_cases_are_two_cases(copy):
    """Captions do not identify a case: the official count subset has one object in several."""
    (copy / "cases.jsonl").unlink()
    folder = copy / "count"
    for name in ("image2text", "text2image"):
        queries = json.loads((folder / f"{name}.json").read_text())
        said = {}
        for case in read_data(copy, ["count"]).cases:
            said |= dict(zip(case.captions, data().cases[-1].captions, strict=True))
        for query in queries:
            query["keys"] = [said.get(key, key) for key in query["keys"]]
            query["query"] = said.get(query["query"], query["query"])
        (folder / f"{name}.new").write_text(json.dumps(queries))
    for name in ("image2text", "text2image"):
        (folder / f"{name}.new").replace(folder / f"{name}.json")
    read = read_data(copy, ["count"])
    assert not read.problems
    assert (len(read.cases), len({case.captions for case in read.cases})) == (4, 1)


def test_an_archive_is_read_as_it_is(copy, tmp_path):
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(copy.rglob("*")):
            file.write(path, Path("data") / path.relative_to(copy))
    read = read_data(archive)
    assert (len(read.cases), read.picture(read.cases[0].images[0]).size) == (24, (96, 96))


def test_a_build_goes_on_where_it_was(tmp_path):
    plan, cases = BuildOptions(seed=5, size=96), dict.fromkeys(VALUES, 4)
    assert build(plan, cases, tmp_path, workers=1) == 120
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.png")}
    lost = sorted(tmp_path.glob("count/images/00002_*.png"))[:3]
    for path in lost:
        path.unlink()
    assert build(plan, cases, tmp_path, workers=1) == 9
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.png")} == files
    assert all((sample() / path.relative_to(tmp_path)).read_bytes() == content for path, content in files.items())


@pytest.mark.slow
def test_processes_draw_the_same(tmp_path):
    plan, cases = BuildOptions(seed=5, size=32), {"count": 100}
    build(plan, cases, tmp_path / "one", workers=1)
    build(plan, cases, tmp_path / "two", workers=2)
    for path in (tmp_path / "one").rglob("*.png"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_another_build_is_not_mixed_in(copy, tmp_path):
    with pytest.raises(PacelineError, match="its seed was 5 and now is 6"):
        build(BuildOptions(seed=6, size=96), dict.fromkeys(VALUES, 4), copy)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(PacelineError, match="not empty and no build"):
        build(BuildOptions(), {"count": 1}, tmp_path / "mine")


def _edit(folder, name, change):
    file = folder / f"{name}.json"
    queries = json.loads(file.read_text())
    change(queries)
    file.write_text(json.dumps(queries))


def test_what_is_broken_is_named_and_the_rest_is_scored(copy):
    (copy / "count/images/00001_3.png").unlink()
    (copy / "count/images/00002_0.png").write_bytes(b"not a picture")
    Image.new("RGB", (96, 48)).save(copy / "existence/images/00000_1.png")
    _edit(copy / "absolute_size", "text2image", lambda queries: queries[0].update(label=7))
    _edit(copy / "relative_size", "image2text", lambda queries: queries[0].update(label=-1))
    _edit(copy / "relative_spatial", "text2image", lambda queries: queries[1]["keys"].pop())
    read = read_data(copy)
    scored = score(small(size=32, patch=16, width=32, layers=1), read)
    text = "\n".join(scored.problems)
    assert "count/images/00001_3.png missing" in text
    assert "count/images/00002_0.png cannot be read as a picture" in text
    assert "existence/images/00000_1.png is 96 x 48, not square" in text
    assert "absolute_size/text2image.json, query 0: label 7 is out of range: there are 3 keys" in text
    assert "relative_size/image2text.json, query 0: label -1 is out of range" in text
    assert "relative_spatial, case" in text
    assert all("\n" not in problem for problem in scored.problems)
    left = {subset: len(scored.cases_of(subset)) for subset in VALUES}
    assert [*left.values()] == [3, 3, 4, 3, 3, 2]


@pytest.mark.parametrize("elsewhere", ["../secret.png", "images/../../secret.png", "{absolute}", "..\\secret.png"])
def test_a_picture_is_below_its_folder(elsewhere, copy):
    """What a data set from the network names is sent to whoever is asked about it."""
    secret = copy / "count" / "secret.png"
    Image.new("RGB", (96, 96)).save(secret)
    for file in (copy / "existence" / "text2image.json", copy / "existence" / "image2text.json"):
        name = elsewhere.format(absolute=secret)
        file.write_text(file.read_text().replace("images/00001_1.png", json.dumps(name)[1:-1]))
    shutil.copy(secret, copy / "secret.png")
    (copy / "cases.jsonl").unlink()
    read = read_data(copy, ["existence"])
    assert len(read.cases) == 3
    assert "is no path below the data set's folder" in "\n".join(read.problems)
    (copy / "pairs.jsonl").write_text(json.dumps({"image": elsewhere.format(absolute=secret), "caption": "a"}))
    with pytest.raises(PacelineError, match="is no path below"):
        read_pairs(copy)


def test_a_picture_of_too_many_pixels_is_named(tmp_path):
    Image.new("1", (14_000, 14_000)).save(tmp_path / "large.png")
    with pytest.raises(PacelineError, match=r"large\.png cannot be read as a picture: Image size"):
        read_picture(tmp_path / "large.png")


def test_nothing_to_read_is_said_in_one_line(tmp_path):
    (tmp_path / "data.zip").write_bytes(b"PK but not really")
    for source, subsets, message in (
        (tmp_path / "nowhere", [], "there is no data set at"), (tmp_path / "data.zip", [], "not a readable zip"),
        (tmp_path, [], "has no subset at all"), (sample(), ["colour"], "has no subset colour"),
    ):
        with pytest.raises(PacelineError, match=message):
            read_data(source, subsets)
