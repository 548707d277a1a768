"""JSON that somebody else wrote: values, or one line that says what is wrong, for every reader there is."""

import bz2
import gzip
import json
import lzma

import pytest

from paceline.bench.suites import read_suite
from paceline.cli.prompts import from_file
from paceline.core.sampling import SamplingParams
from paceline.draft.shapes import read_paths
from paceline.errors import PacelineError, PromptError
from paceline.formats.tokenizer import Tokenizer
from paceline.jsonl import NotJSON, loads
from paceline.logs.conversations import Reading, read_trace
from paceline.replay.corpus import texts
from paceline.replay.report import read_cost
from paceline.textfiles import Piece, objects, pieces_of
from paceline.train.data import parse_source, read

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
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(NotJSON) as caught:
        loads(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 120


def test_what_is_not_utf_8_is_said():
    with pytest.raises(NotJSON, match="not UTF-8 at byte 1"):
        loads(b'"\xff"')


def test_what_is_right_is_read():
    assert loads(b'\xef\xbb\xbf{"a": [1e400, 12345678901234567890]}') == {"a": [float("inf"), 12345678901234567890]}
    assert loads('"\\ud83d\\ude00"') == "\U0001f600"
    assert loads('"\\\\ud800"') == "\\ud800"
    assert loads(json.dumps([[]] * 1000)) == [[]] * 1000
    assert loads("[" * 100 + "]" * 100) is not None


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_are_numbered_as_an_editor_does(tmp_path, pack):
    path = tmp_path / "a.jsonl"
    path.write_bytes(pack(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": "\xc3\xbc\xe2\x80\xa8"}\n[1]'))
    found = objects(path, PromptError, "an object with a")
    assert next(found) == (f"{path}, line 1", {"a": 1})
    assert next(found) == (f"{path}, line 4", {"b": "ü\u2028"})
    with pytest.raises(PromptError, match=r"line 5: a JSON object is wanted \(an object with a\), not a list"):
        next(found)


def _zstd(content):
    pyarrow = pytest.importorskip("pyarrow")
    return bytes(pyarrow.Codec("zstd").compress(content))


def _utf16(name):
    mark = "\ufeff"
    return lambda content: (mark + content.decode()).encode(name)


PACKINGS = {
    "UTF-8": bytes,
    "a mark of byte order": lambda content: b"\xef\xbb\xbf" + content,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zstd": _zstd,
    "UTF-16, low byte first": _utf16("utf-16-le"),
    "UTF-16, high byte first": _utf16("utf-16-be"),
    "UTF-16 in gzip": lambda content: gzip.compress(_utf16("utf-16-le")(content)),
}
SAID = [{"prompt": "Grüße\u2028 \U0001f600", "response": "one"}, {"prompt": "b", "response": "two"}]


def _lines(values, indent=None):
    return "".join(json.dumps(value, ensure_ascii=False, indent=indent) + "\n" for value in values).encode()


LAYOUTS = {
    "lines": _lines(SAID),
    "a list in a line": _lines([SAID]),
    "a list over lines": _lines([SAID], indent=2),
    "a list, an item a line": b"[" + b",\n".join(_lines([one]).strip() for one in SAID) + b"]",
    "objects over lines": _lines(SAID, indent=4),
    "blank lines first": b"\n\n" + _lines([SAID], indent=1),
}


def _read_by(reader, path):
    """What a reader makes of a file, for a search in it."""
    if reader == "objects":
        return repr([record for _, record in objects(path, PacelineError, "a record")])
    if reader == "generate --prompts":
        return repr(from_file(str(path), SamplingParams()))
    return repr(READERS[reader](path))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_content_says_how_a_file_is_packed_and_laid_out(tmp_path, layout, packing):
    path = tmp_path / "log.jsonl"  # the name says nothing
    path.write_bytes(PACKINGS[packing](LAYOUTS[layout]))
    for reader in ("objects", *READERS):
        found = _read_by(reader, path)
        for one in SAID:
            assert repr(one["prompt"])[1:-1] in found, reader
    assert len(read_trace(path)) == 2
    pieces = [*pieces_of(path, PacelineError)]
    assert pieces == [Piece(path)] or (layout, packing) == ("lines", "UTF-8") or packing == "a mark of byte order"


def test_a_table_is_known_by_its_content(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "log.jsonl"
    parquet.write_table(pyarrow.Table.from_pylist(SAID), path)
    for reader in ("objects", *READERS):
        assert repr(SAID[0]["prompt"])[1:-1] in _read_by(reader, path), reader
    assert [*pieces_of(path, PacelineError)] == [Piece(path)]


CHAT = [{"role": "user", "content": [{"type": "text", "text": "Hello?"}]}, {"role": "assistant", "content": "Hi."}]
OBSERVED = {"type": "GENERATION", "traceId": "t", "input": CHAT[:1], "output": CHAT[1]}
WHOLE = {
    "one object": ({"messages": CHAT, "id": 1}, 1),
    "one conversation": (CHAT, 1),
    "conversations": ([{"messages": CHAT}, {"messages": CHAT}], 2),
    "Langfuse's page": ({"data": [OBSERVED, OBSERVED], "meta": {"page": 1, "totalItems": 2}}, 2),
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_is_one_value(tmp_path, name, indent):
    value, count = WHOLE[name]
    path = tmp_path / "log.json"
    path.write_text(json.dumps(value, indent=indent))
    every = read_trace(path)
    assert [[str(message["content"]) for message in one.messages] for one in every] == [["Hello?", "Hi."]] * count


def test_what_is_wrong_with_json_over_lines_is_said_and_a_line_that_is_cut_off_costs_no_other(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{\n  "prompt": "a"\n  "response": "b"\n}\n')
    with pytest.raises(PromptError, match=r"a\.jsonl: not JSON: Expecting ',' delimiter at line 3, column 3"):
        list(objects(path, PromptError, ""))
    path.write_bytes(b'{"prompt":\n' + _lines(SAID))
    reading = Reading()
    assert len(read_trace(path, reading=reading)) == 2
    assert reading.first == f"{path}, line 1: not JSON: Expecting value at column 11"


@pytest.mark.parametrize("pack", [lzma.compress, bz2.compress, _zstd, _utf16("utf-16-le")])
def test_a_packed_file_that_is_cut_off_is_one_line(tmp_path, pack):
    path = tmp_path / "a.jsonl"
    path.write_bytes(pack(_lines(SAID * 1000))[:-7])
    with pytest.raises(PromptError, match=r"a\.jsonl(, line 2000: not JSON| is cut off or damaged)"):
        list(objects(path, PromptError, ""))


def test_a_file_cut_off_or_missing(tmp_path):
    packed = gzip.compress(b'{"a": 1}\n' * 1000)
    (tmp_path / "a.gz").write_bytes(packed[:-20])
    with pytest.raises(PromptError, match=r"a\.gz is cut off or damaged"):
        list(objects(tmp_path / "a.gz", PromptError, ""))
    (tmp_path / "b.gz").write_bytes(packed[:20] + b"\0\xff" * 20)
    with pytest.raises(PromptError, match=r"b\.gz is cut off or damaged"):
        list(objects(tmp_path / "b.gz", PromptError, ""))
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        list(objects(tmp_path / "none", PromptError, ""))


def _prompts(path):
    _, broken = from_file(str(path), SamplingParams())
    raise broken[0]


READERS = {
    "generate --prompts": _prompts,
    "replay": read_trace,
    "bench --suite": lambda path: read_suite(str(path)),
    "corpus build": lambda path: list(texts(path, Tokenizer(None))),
    "train": lambda path: list(read(parse_source(f"a={path}"))),
}
VALUES = [DEEP, "9" * 5_000, '"\\ud800"', "\udcff"]


@pytest.mark.parametrize("value", VALUES, ids=["deep", "digits", "surrogate", "bytes"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_the_line(tmp_path, reader, value):
    path = tmp_path / "a.jsonl"
    line = f'{{"prompt": "a", "response": "b", "id": {value}}}'
    path.write_text(f"\n{line}\n", "utf-8", "surrogateescape")
    with pytest.raises(PacelineError) as caught:
        READERS[reader](path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 120


@pytest.mark.parametrize("bias", [{"1_0": 1}, {" 1": 1}, {"+1": 1}, {"\uff11": 1}, {"": 1}, [1], 1, "1"], ids=repr)
def test_token_ids_of_a_prompts_file_are_digits(tmp_path, bias):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(_lines([{"prompt": "a", "logit_bias": {"10": 1}}, {"prompt": "a", "logit_bias": bias}]))
    (job,), (broken,) = from_file(str(path), SamplingParams())
    assert job.params.logit_bias == {10: 1}
    assert str(broken).startswith(f'{path}, line 2: "logit_bias" must be an object of token ids')


@pytest.mark.parametrize("text", [DEEP, "[[" + "9" * 5_000 + "]]", "[1, 2]"])
def test_a_tree_of_recycling(tmp_path, text):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_paths(path)
    assert len(str(caught.value)) < 120


def test_a_table_of_costs(tmp_path):
    (tmp_path / "cost.json").write_text(DEEP)
    with pytest.raises(PacelineError, match="is not a table of verification costs"):
        read_cost(str(tmp_path / "cost.json"))
