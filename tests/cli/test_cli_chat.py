"""`paceline chat`: history, commands, Ctrl-C, and a history that no longer fits."""

import io
import re
import signal
import sys

from paceline.cli.chat import Conversation
from paceline.cli.show import Screen
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine


def _talk(tiny, monkeypatch, *lines, max_tokens=6):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    conversation = Conversation(Engine(tiny, "sam"), params, Screen())
    conversation.run()
    return conversation


def test_answers_stand_in_the_history(tiny, monkeypatch):
    talk = _talk(tiny, monkeypatch, "hello", "", "the cat")
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert [m["content"] for m in talk.messages[::2]] == ["hello", "the cat"]
    first, second = (answer.row for answer in talk.answers)
    assert talk.messages[1]["content"] == first.text
    engine = talk.engine
    assert second.tokens[: second.prompt_length].tolist() == engine.encode(talk.messages[:3]).tolist()


def test_reset_forgets(tiny, monkeypatch):
    talk = _talk(tiny, monkeypatch, "hello", "/reset", "the cat")
    assert ([m["content"] for m in talk.messages[::2]], len(talk.answers)) == (["the cat"], 1)


def test_a_document_stands_in_front_of_the_first_message(command, tiny, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the little cat\n")
    said = command("chat", tiny, "-n", 5, "--file", file, stdin="the dog\nhello\n/reset\nthe dog\n")
    typed = command("chat", tiny, "-n", 5, stdin="the dog\n")
    assert (said.code, typed.code) == (0, 0)
    first, _, again = said.out.splitlines()
    assert first == again
    engine = Engine(tiny)
    (alone,) = engine.generate(
        [[{"role": "user", "content": "the little cat\n\nthe dog"}]], SamplingParams(max_tokens=5)
    )
    assert (first, "tokens/s" in said.err) == (alone.text, True)


def test_quit_leaves_at_once(tiny, monkeypatch):
    assert _talk(tiny, monkeypatch, "/quit", "hello").messages == []


def test_how_far_a_long_message_is_read_is_shown(tiny, monkeypatch, capsys):
    monkeypatch.setattr("paceline.cli.show.REPORT_EVERY", 0.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat " * 30 + "\n"))
    Conversation(Engine(tiny, "sam", prefill_chunk=32), SamplingParams(max_tokens=6), Screen()).run()
    said = re.findall(r"^(\d+) of (\d+) tokens read", capsys.readouterr().err, re.MULTILINE)
    assert ([int(done) for done, _ in said], {int(all) > 64 for _, all in said}) == ([32, 64], {True})


def test_commands(command, tiny):
    said = "hello\n/stats\n/help\n/halp\n"
    result = command("chat", tiny, "-n", 5, stdin=said)
    assert result.code == 0
    (answer,) = re.findall(r"^(\d+) new tokens in (\d+) rounds", result.err, re.MULTILINE)
    stats = re.search(r"1 answer, (\d+) new tokens in (\d+) rounds.*; (\d+) of 128 tokens of context", result.err)
    assert (stats.groups()[:2], result.err.count("/reset")) == (answer, 2)
    assert "there is no command /halp" in result.err


def test_a_history_that_no_longer_fits_is_said_and_the_chat_goes_on(tiny, monkeypatch, capsys):
    talk = _talk(tiny, monkeypatch, "hello", "the cat " * 99, "/reset", "dog")
    err = capsys.readouterr().err
    assert "error: The prompt is too long" in err
    assert "128" in err
    assert "/reset" in err
    assert [m["content"] for m in talk.messages[::2]] == ["dog"]


def test_an_answer_that_fills_the_context(tiny, monkeypatch, capsys):
    _talk(tiny, monkeypatch, "hello", max_tokens=500)
    assert "context is full" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(endless, monkeypatch, capsys):
    write = Screen.write
    written = []

    def interrupting(self, pieces):
        written.append(pieces)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)
        write(self, pieces)

    monkeypatch.setattr(Screen, "write", interrupting)
    talk = _talk(endless, monkeypatch, "hello", "/stats", max_tokens=40_000)
    assert talk.answers[0].row.finish_reason == "abort"
    assert 1 <= talk.answers[0].row.num_new < 1000
    assert talk.messages[1]["content"] == talk.answers[0].row.text != ""
    assert not talk.engine.has_work
    assert "1 answer, " in capsys.readouterr().err


def test_a_model_without_a_chat_template(command, tiny, tmp_path):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    for file in model.glob("chat_template*"):
        file.unlink()
    result = command("chat", model, stdin="hello\n")
    assert result.code == 2
    assert "chat template" in result.err
