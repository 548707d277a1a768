"""JSON that somebody else wrote: values, or one line that says what is wrong, for every reader there is."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bench.suites import read_suite
from paceline.cli.prompts import from_file
from paceline.core.sampling import SamplingParams
from paceline.draft.shapes import read_paths
from paceline.errors import PacelineError, PromptError
from paceline.jsonl import NotJSON, loads, objects
from paceline.replay.report import read_cost
from paceline.target.tokenizer import Tokenizer
from paceline.train.data import parse_source, read
from paceline.workbench.conversations import read_trace
from paceline.workbench.corpus import texts

DEEP = "[" * 200_000 + "]" * 200_000
BROKEN = {
    DEEP: "nested more than 100 levels deep",
    "[" * 101 + "1" + "]" * 101: "nested more than 100 levels deep",
    "9" * 5_000: "4,300 digits",
    '{"prompt": "\\ud800"}': "\\ud800 is half of a surrogate pair",
    '{"prompt": "\\uDC00 and \\uD83D\\uDE00"}': "\\udc00 is half of a surrogate pair",
    '{"prompt": ': "not JSON: Expecting value at column 12",
    '{\n"prompt": ': "not JSON: Expecting value at line 2, column 11",
    '{"prompt": "a': "not JSON: Unterminated string starting at column 12",
    '{"prompt": "a\nb"}': "not JSON: Invalid control character at line 1, column 14",
}


@pytest.mark.parametrize(("text", "said"), BROKEN.items(), ids=range(len(BROKEN)))
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(NotJSON) as caught:
        loads(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 120


def test_what_is_not_utf_8_is_said() -> None:
    with pytest.raises(NotJSON, match="not UTF-8 at byte 1"):
        loads(b'"\xff"')


def test_what_is_right_is_read() -> None:
    assert loads(b'\xef\xbb\xbf{"a": [1e400, 12345678901234567890]}') == {"a": [float("inf"), 12345678901234567890]}
    assert loads('"\\ud83d\\ude00"') == "\U0001f600"
    assert loads('"\\\\ud800"') == "\\ud800"
    assert loads(json.dumps([[]] * 1000)) == [[]] * 1000
    assert loads("[" * 100 + "]" * 100) is not None


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_are_numbered_as_an_editor_does(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(pack(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": "\xc3\xbc\xe2\x80\xa8"}\n[1]'))
    found = objects(path, PromptError, "an object with a")
    assert next(found) == (f"{path}, line 1", {"a": 1})
    assert next(found) == (f"{path}, line 4", {"b": "ü\u2028"})
    with pytest.raises(PromptError, match=r"line 5: a JSON object is wanted \(an object with a\), not a list"):
        next(found)


def test_a_file_cut_off_or_missing(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"a": 1}\n' * 1000)
    (tmp_path / "a.gz").write_bytes(packed[:-20])
    with pytest.raises(PromptError, match=r"a\.gz is cut off or damaged"):
        list(objects(tmp_path / "a.gz", PromptError, ""))
    (tmp_path / "b.gz").write_bytes(packed[:20] + b"\0\xff" * 20)
    with pytest.raises(PromptError, match=r"b\.gz is cut off or damaged"):
        list(objects(tmp_path / "b.gz", PromptError, ""))
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        list(objects(tmp_path / "none", PromptError, ""))


def _prompts(path: Path) -> object:
    _, broken = from_file(str(path), SamplingParams())
    raise broken[0]


READERS: dict[str, Callable[[Path], object]] = {
    "generate --prompts": _prompts,
    "replay": read_trace,
    "bench --suite": lambda path: read_suite(str(path)),
    "corpus build": lambda path: list(texts(path, Tokenizer(None))),
    "train": lambda path: list(read(parse_source(f"a={path}"))),
}
VALUES = [DEEP, "9" * 5_000, '"\\ud800"', "\udcff"]


@pytest.mark.parametrize("value", VALUES, ids=["deep", "digits", "surrogate", "bytes"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_the_line(tmp_path: Path, reader: str, value: str) -> None:
    path = tmp_path / "a.jsonl"
    line = f'{{"prompt": "a", "response": "b", "id": {value}}}'
    path.write_text(f"\n{line}\n", "utf-8", "surrogateescape")
    with pytest.raises(PacelineError) as caught:
        READERS[reader](path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 120


@pytest.mark.parametrize("text", [DEEP, "[[" + "9" * 5_000 + "]]", "[1, 2]"])
def test_a_tree_of_recycling(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_paths(path)
    assert len(str(caught.value)) < 120


def test_a_table_of_costs(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(DEEP)
    with pytest.raises(PacelineError, match="is not a table of verification costs"):
        read_cost(str(tmp_path / "cost.json"))
