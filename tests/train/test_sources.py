"""Sources: every kind of file and record, one clear line for a broken one, and a stable held-out split."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.train.data import held_out, parse_source, parse_sources, read, split


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(path: Path) -> list[Any]:
    return list(read(parse_source(str(path))))


def test_every_record_is_recognised(tmp_path: Path) -> None:
    rows = [
        {"text": "plain"},
        {"title": "Title", "text": "body"},
        {"instruction": "Do it", "context": "With this", "response": "Done", "category": "closed_qa"},
        {"question": "Why?", "answer": "Because."},
        {"turns": [{"role": "user", "text": "Hi"}, {"role": "assistant", "text": "Hello"}]},
        {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]},
    ]
    found = documents(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [d.text for d in found[:2]] == ["plain", "Title\n\nbody"]
    assert found[2].messages[0] == {"role": "user", "content": "Do it\n\nWith this"}
    assert found[2].context == "With this"
    assert found[2].fields == {"instruction": "Do it", "response": "Done", "category": "closed_qa"}
    assert found[3].messages[1] == {"role": "assistant", "content": "Because."}
    assert [m["role"] for m in found[4].messages] == ["user", "assistant"]
    assert found[5].messages[0]["role"] == "system"


def test_gzip_and_plain_text_read_alike(tmp_path: Path) -> None:
    text = "Erster Absatz.\n\nZweiter Absatz, größer.\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    plain, packed = documents(tmp_path / "a.txt"), documents(tmp_path / "b.txt.gz")
    assert [d.text for d in plain] == [d.text for d in packed] == ["Erster Absatz.\n\nZweiter Absatz, größer."]


def test_long_text_is_cut_at_paragraphs(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i}. " + "word " * 300 for i in range(30)]
    (tmp_path / "long.txt").write_text("\n\n".join(paragraphs))
    found = documents(tmp_path / "long.txt")
    assert len(found) > 2
    assert "\n\n".join(d.text for d in found) == "\n\n".join(paragraphs)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1, 2]", "line 2: a JSON object is wanted"),
        ('{"body": "x", "kind": "y"}', "line 2: unknown record with the keys body, kind; a line is"),
        ('{"text": 7}', "line 2: \"text\" must be a text, not a int"),
        ('{"turns": [{"role": "robot", "text": "x"}]}', "line 2: the role 'robot' is none of system, user, assistant"),
        ('{"messages": []}', "line 2: \"messages\" must be a list"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(PacelineError) as caught:
        documents(path)
    assert str(caught.value).startswith(f"{path}, {complaint}")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"fine\nM\xe4rz\n")
    with pytest.raises(PacelineError, match="line 2: not UTF-8"):
        documents(tmp_path / "latin.txt")
    (tmp_path / "torn.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:40])
    with pytest.raises(PacelineError, match="is cut off or damaged"):
        documents(tmp_path / "torn.txt.gz")


def test_specs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "some.rows.jsonl", [{"text": "x"}])
    assert parse_source(str(path)).name == "some.rows"
    assert [s.name for s in parse_sources([f"mine={path}", f"mine={path}"])] == ["mine", "mine"]
    for spec, complaint in (
        ("mine=/no/such.txt", "no such file"),
        ("=x", "not a source"),
        (f"a={tmp_path}", "no such"),
    ):
        with pytest.raises(PacelineError, match=complaint):
            parse_source(spec)
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(PacelineError, match=r"x\.csv is not \.txt"):
        parse_source(str(tmp_path / "x.csv"))


def test_the_split_depends_on_content_alone(tmp_path: Path) -> None:
    rows = [{"text": f"document number {i}"} for i in range(3000)]
    train, valid = split(documents(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert 10 <= len(valid) <= 60  # 1 % of 3000, and luck
    assert not {d.text for d in train} & {d.text for d in valid}
    again = documents(write_jsonl(tmp_path / "b.jsonl", rows[::-1]))
    assert {d.text for d in again if held_out(d)} == {d.text for d in valid}


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"question": "2 + 2?", "answer": "4"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    plain, full = parse_source("hf:openai/gsm8k"), parse_source("sums=hf:openai/gsm8k:main@test")
    assert (plain.name, full.name) == ("gsm8k", "sums")
    (document,) = read(full)
    assert document.messages[1]["content"] == "4"
    list(read(plain))
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", None, "train")]
    with pytest.raises(PacelineError, match="is not hf:OWNER/DATA"):
        parse_source("x=hf:gsm8k")


def test_a_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: object, **kw: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(PacelineError, match=r"cannot be loaded from the hub \(no network\); give a file instead: x=P"):
        list(read(parse_source("x=hf:a/b")))
