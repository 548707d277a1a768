"""The report in a browser: on a phone and on a desk, light and dark, nothing wider than the window, no complaint."""

from pathlib import Path
from typing import Any

import pytest
from tests.bench.runs import TASKS, WHY, make_run
from tests.pages.browser import WIDTHS, browse, measured, needs_chromium

from paceline.bench.page import page
from paceline.bench.report import read_run

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twenty methods, long names, a long word, failures, predictions: everything a report can hold."""
    methods = {
        "none": 1.0, "hierarchy,order=WL,model=build/own,corpus=build/four,n=8": 1.7,
        "averylongnamewithoutanyplacetobreakitatall": 1.5, "peer:transformers-assisted:models/draft": 0.8,
        **{f"method-{i},tree={i}": 1 + i / 10 for i in range(16)},
    }  # fmt: skip

    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        about["as_large"] = "The model was enlarged to 1.0B parameters without changing what it says."
        about["tuned"] = "The model was fine-tuned with noise from another."
        about["environment"]["command"] = "paceline bench models/demo " + "--draft=" + "x" * 300
        summary["results"][1 + len(TASKS)]["differs"] = [
            {"question": "q" * 60, "repeat": 0, "turn": 0, "at": 35, "verdict": "bug", "gap": 0.5, "noise": 0.01}
        ]
        devices = ("A100 SXM 80 GB", "H100 SXM5", "H200 SXM", "RTX 3090", "RTX 4090", "L4", "Jetson AGX Orin 64")
        summary["predictions"] = {"devices": {d: {name: [0.9, 1, 1.1] for name in methods} for d in devices}}

    text = "An answer of some words\n\n  and lines <b>, then " + "w" * 400 + " end"
    folder = make_run(
        tmp_path_factory.mktemp("run"), methods, failed={"method-3,tree=3": "e" * 200},
        not_installed={"peer:vllm-ngram": WHY}, text=text, complete=False, change=change,
    )  # fmt: skip
    return page(read_run(folder))


def test_nothing_is_wider_than_the_window(tmp_path: Path, html: str) -> None:
    found, complaints = measured(tmp_path, html)
    assert sorted(found) == list(WIDTHS)
    for width, told in found.items():
        assert told["wide"] <= width
        assert told["narrowest"] > 120  # a plot can be read
        assert told["loaded"] == []
        assert told["color"] == "rgb(255, 255, 255)"
    assert found[390]["height"] > found[1280]["height"]
    assert complaints == []


def test_dark_where_the_reader_wants_it_dark(tmp_path: Path, html: str) -> None:
    found, _ = measured(tmp_path, html, "--force-dark-mode")
    assert {told["color"] for told in found.values()} == {"rgb(20, 24, 30)"}


def test_a_picture_of_it(tmp_path: Path, html: str) -> None:
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(html, "utf-8")
    browse(tmp_path, file, f"--screenshot={picture}", "--window-size=1280,2000")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1280, 2000)
    assert len(content) > 100_000  # an empty page has some 10 kB
