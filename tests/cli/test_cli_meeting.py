"""What one command writes, the next reads: every file of prompts or answers, with every command that takes one."""

import json
from types import SimpleNamespace
from typing import cast

import pytest
from tests import models
from tests.evals.endpoint import Scripted
from tests.evals.test_run import go

from paceline.bench.suites import read_suite
from paceline.cli import main
from paceline.cli.prompts import from_file
from paceline.cli.tune import Recorded, _answers
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.replay.corpus import texts
from paceline.replay.tune import Tuning
from paceline.serve.metrics import RequestLog
from paceline.serve.worker import Job
from paceline.train import data
from paceline.train.generated import generated_rows

ASK = [f"the cat and the dog {i}" for i in range(3)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(models.make_repetitive(tmp_path_factory.mktemp("model"), max_position_embeddings=1024))


def encoded(messages, engine):
    return engine.tokenizer.encode_chat(messages)


@pytest.fixture(scope="module")
def written(engine, tmp_path_factory):
    """The file of every writer, and files that people have."""
    folder, model = tmp_path_factory.mktemp("written"), str(engine.target.folder)

    def lines(name, records):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    suite = lines("suite", [{"question_id": i, "category": "qa", "turns": [text]} for i, text in enumerate(ASK)])
    asked = [[{"role": "user", "content": text}] for text in ASK]
    files = {
        "a suite": suite,
        "requests": lines("requests", [
            {"model": "m", "stream": True, "max_completion_tokens": 8, "messages": messages} for messages in asked
        ]),
        "a batch": lines("batch", [
            {"custom_id": str(i), "method": "POST", "body": {"model": "m", "messages": messages}}
            for i, messages in enumerate(asked)
        ]),
        "verl's rollouts": lines("verl", [
            {"input": text, "output": "a dog", "gts": "a cat", "score": 0.5, "step": 3} for text in ASK
        ]),
    }  # fmt: skip
    texts_of = lines("p", [{"prompt": text} for text in ASK])
    for name, prompts in (("generate -o", texts_of), ("generate -o, messages", files["requests"])):
        files[name] = folder / f"{name}.jsonl"
        assert main(["generate", model, "-p", str(prompts), "-n", "8", "-o", str(files[name])]) == 0
    run = folder / "run"
    how = ("-d", "sam", "--suite", str(suite), "-n", "8", "--warm-up", "0", "--out", str(run))
    assert main(["bench", model, *how]) == 0
    files["bench answers.jsonl"] = run / "answers.jsonl"
    files["serve --log"] = folder / "served.jsonl"
    log = RequestLog(files["serve --log"])
    for messages, done in zip(asked, engine.generate(asked, SamplingParams(max_tokens=8)), strict=True):
        ids = encoded(messages, engine)
        log.write(cast("Job", SimpleNamespace(completion=done, row=None, prompt=ids, params=SamplingParams())))
    log.close()
    files["train answers.jsonl"] = generated_rows(model, count=4, max_tokens=8, out=folder / "answers.jsonl")
    with Scripted() as server:
        go(server, folder / "align", judge=["checks"], limit=3)
    files["eval align"] = folder / "align" / "generations.jsonl"
    return files


def _tuned(engine, file):
    tuning = cast("Tuning", SimpleNamespace(target=engine.target, tokenizer=engine.tokenizer))
    return len(_answers(tuning, Recorded(log=file)))


def _prompts(engine, file):
    jobs, broken = from_file(str(file), SamplingParams())
    if broken:
        raise broken[0]
    return len(jobs)


def _trained(engine, file):
    assert engine.tokenizer is not None
    return len([*data.read_examples(file, engine.tokenizer, need_prompts=True)])


def _counted(engine, file):
    assert engine.tokenizer is not None
    return len([*data.read_examples(file, engine.tokenizer)])


def _copied(engine, file):
    assert engine.tokenizer is not None
    return len([*texts(file, engine.tokenizer)])


READERS = {
    "replay, tune": _tuned,
    "train --data": _trained,
    "train vocab --text": _counted,
    "train --prompts": lambda engine, file: len([*data.read(data.parse_source(str(file)))]),
    "corpus build": _copied,
    "generate -p, certify --prompts": _prompts,
    "bench --suite": lambda engine, file: len(read_suite(str(file)).questions),
}
ANSWERS, QUESTIONS = ("replay, tune", "train --data", "train vocab --text", "corpus build"), [*READERS][-2:]
MEET = {
    "generate -o": {*READERS}, "generate -o, messages": {*READERS}, "eval align": {*READERS}, "serve --log": {*ANSWERS},
    "train answers.jsonl": {*ANSWERS}, "verl's rollouts": {*READERS} - {"generate -p, certify --prompts"},
    "bench answers.jsonl": {"train vocab --text", "corpus build", "train --prompts"},
    "a suite": {*QUESTIONS, "train --prompts", "corpus build"},
    "requests": {*QUESTIONS, "train --prompts", "corpus build"},
    "a batch": {*QUESTIONS, "train --prompts", "corpus build"},
}
"""Which files are read by which commands; of answers, those with prompts can be asked again."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", MEET)
def test_what_one_command_writes_the_next_reads_or_says_why_not(engine, written, writer, reader):
    read = READERS[reader]
    if reader in MEET[writer]:
        assert read(engine, written[writer]) >= 3
    else:
        with pytest.raises(PacelineError) as said:
            read(engine, written[writer])
        assert "\n" not in str(said.value)
        assert f"{written[writer]}" in str(said.value)


def test_a_benchmarks_answers_are_replayed_with_their_questions(command, engine, written):
    how = ("--tokenizer", engine.target.folder, "-d", "sam", "--workers", 1, "--json")
    shown = command("replay", written["bench answers.jsonl"], "--questions", written["a suite"], *how)
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["answers"] >= 3
