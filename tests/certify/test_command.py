"""`paceline certify` as a command: exit status, JSON, the folder, mistakes."""

import json
import signal
from time import perf_counter, sleep

import pytest

from paceline.certify.greedy import Reader
from paceline.certify.page import detectable
from paceline.certify.scenarios import SCENARIOS, Play
from paceline.cli import main
from paceline.cli.show import Steps
from paceline.target.decoder import Decoder
from paceline.target.load import quantise_folder
from tests import models
from tests.gguf_files import write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.make_repetitive(tmp_path_factory.mktemp("tiny"), vocab_size=288, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Fewer prompts than there are by default."""
    file = tmp_path_factory.mktemp("few") / "prompts.jsonl"
    asked = ("The cat sat on the mat. The cat sat", "Count from 1 to 9, and then again from 1 to 9.")
    file.write_text("".join(json.dumps({"messages": [{"role": "user", "content": one}]}) + "\n" for one in asked))
    return ["--prompts", str(file)]


def test_a_certificate_is_printed_and_written(tiny, few, tmp_path, capsys):
    out = tmp_path / "certificate"
    files = ["--out", str(out), "--junit", str(tmp_path / "junit.xml")]
    how = ["--requests", "100", "--shift", "0.5", "--max-tokens", "12", "--budget", "1h", "--json", *files, *few]
    how += ["--leave-out", "tool calls"]
    assert main(["certify", str(tiny), "-d", "sam", *how]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "certificate.json").read_text("utf-8"))
    assert {"lossless", "greedy", "sampled", "power", "acceptance", "not_tested", "environment"} <= found.keys()
    assert found["lossless"]
    assert found["sampled"]["requests"] == 100
    assert "Lossless, as far as was tested" in (out / "certificate.html").read_text("utf-8")
    verdicts = {row["scenario"]: row["verdict"] for row in found["scenarios"]}
    assert {verdicts[name] for name in ("8 requests at once", "stop strings, 4 at once", "stop tokens")} == {"passed"}
    assert verdicts["JSON schema"] == "passed"  # asked as its server is
    assert 'failures="0"' in (tmp_path / "junit.xml").read_text("utf-8")


def test_a_budget_is_for_all_tests(tiny, few, capsys):
    """Greedy answers are read in one way, and sampled as few as a test takes; the certificate says what that misses."""
    assert main(["certify", str(tiny), "-d", "sam", "--max-tokens", "12", "--budget", "0.01s", "--json", *few]) == 3
    printed = capsys.readouterr()
    assert "greedy answers\n" in printed.err  # what is done is said where there is no terminal for a bar, too
    found = json.loads(printed.out)
    assert "would be missed" in found["why"]
    assert "greedy answers in batches of 8: the budget was spent" in found["not_tested"]
    (line,) = (line for line in detectable(found) if "the budget was spent" in line)
    assert line.startswith("Not tested (the budget was spent): greedy answers alone to 1 of 2 prompts; greedy answers")
    assert 0 < found["sampled"]["requests"] < 1000  # a shift of 0.02 takes thousands
    assert 0 < found["sampled"]["long"]["tokens"] <= 32 * 12  # 4 batches of 8
    assert {row["why"] for row in found["scenarios"] if not row["why"].startswith("the endpoint")} == {
        "the budget was spent"
    }


def test_what_takes_time_is_said_before_it_and_what_has_none_is_not(tiny, few, capsys):
    """Every load, and that there is nothing to find without a drafter; no scenario after the budget is spent."""
    assert main(["certify", str(tiny), "--max-tokens", "4", "--budget", "0.01s", "--json", *few]) == 3
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    why = "nothing is drafted, for --draft names no drafter"
    assert json.loads(printed.out)["why"] == why
    begun = [f"loading {what}; the budget begins when all is loaded" for what in ("the reference", "the control")]
    loads = [line for line in lines if line.startswith("loading")]
    assert loads == [f"loading {tiny}; the verdict can only be 'cannot say': {why}", *begun]
    assert not {scenario.name for scenario in SCENARIOS} & {*lines}


def test_a_budget_bounds_every_test(tiny, few, capsys, monkeypatch):
    """However slow the model is: every forward takes 10 ms, and all of it would take minutes."""
    verify = Decoder.verify

    def slow(self, *how, **more):
        sleep(0.01)
        return verify(self, *how, **more)

    monkeypatch.setattr(Decoder, "verify", slow)
    monkeypatch.setattr("paceline.certify.parts.LEAST_SECONDS", 0)
    began = perf_counter()
    code = main(["certify", str(tiny), "-d", "sam", "--dtype", "int8", "-n", "24", "--budget", "2s", "--json", *few])
    assert perf_counter() - began < 30
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"], found["greedy"]["answers"] > 0) == (3, "cannot say", True)
    assert any(row["why"] == "the budget was spent" for row in found["scenarios"])


@pytest.mark.parametrize("at", ["read", "play"])
def test_ctrl_c_keeps_what_was_found(tiny, few, tmp_path, capsys, monkeypatch, at):  # fmt: skip
    """In greedy answers, and in scenarios."""
    of = Reader if at == "read" else Play
    before = getattr(of, at)

    def interrupted(*how, **more):
        done = before(*how, **more)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(of, at, before)
        return done

    monkeypatch.setattr(of, at, interrupted)
    how = ("--requests", "50", "--shift", "0.5", "--max-tokens", "8", "--out", str(tmp_path / "out"))
    assert main(["certify", str(tiny), "-d", "sam", *how, *few]) == 130
    printed = capsys.readouterr()
    assert "Cannot say: it was interrupted" in printed.out
    assert "interrupted; the certificate is of what was tested until then" in printed.err
    found = json.loads((tmp_path / "out" / "certificate.json").read_text("utf-8"))
    assert (found["verdict"], found["lossless"], found["broken"]) == ("cannot say", False, "it was interrupted")
    assert found["greedy"]["answers"] >= 1
    assert 'class="verdict unsure"' in (tmp_path / "out" / "certificate.html").read_text("utf-8")
    assert (found["sampled"]["requests"] == 50) is (at == "play")


def test_progress_within_a_budget_is_its_seconds(capsys, monkeypatch):
    """Not what the first of 40,000 requests promise, of which most will never be asked."""
    now = [100.0]
    monkeypatch.setattr("paceline.cli.show.monotonic", lambda: now[0])
    with Steps("starting") as steps:
        steps.limit(300)
        for seconds in (1, 2, 90, 180):
            now[0] = 100.0 + seconds
            steps.say(f"part {seconds}")
            steps.show(seconds, 40_000)
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert lines == ["90 of 300 seconds, 4 min left", "180 of 300 seconds, 2 min left"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--budget", "soon"], "it is a time such as 90s, 5m or 1h"),
    (["--engine", "nope", "--dtype", "int8"], "there is no engine 'nope'"),
    (["--draft", "samm"], "There is no drafter 'samm'"),
    (["--draft", "samm", "--engine", "transformers"], "There is no drafter 'samm'"),
    (["--against", "http://127.0.0.1:9/v1"], "is not one of 'float32'"),
])
def test_mistakes_are_named_before_a_model_is_loaded(arguments, message, tiny, capsys):
    assert main(["certify", str(tiny), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


@pytest.mark.parametrize(("kind", "dtype", "weights"), [
    ("folder", "int8", "Q8_0"), ("folder", "int4", "Q4_0"), ("blocks", "float32", "float32, expanded from Q8_0"),
    ("F16", "auto", "a GGUF file"), ("Q8_0", "auto", "Q8_0"), ("Q8_0", "float32", "float32, expanded from Q8_0"),
])
def test_what_transformers_does_not_have_is_compared_with_its_own_plain_decoding(
    kind, dtype, weights, tiny, few, tmp_path, capsys
):
    model = tiny
    if kind == "blocks":
        quantise_folder(tiny, model := tmp_path / "made", "int8")
    elif kind != "folder":
        model = write(tiny, tmp_path / "model.gguf", kind)
    how = ["--requests", "0", "--max-tokens", "12", "--budget", "0", "--dtype", dtype, *few]
    assert main(["certify", str(model), "-d", "sam", *how]) == 0
    assert f"The reference is our own plain decoding of these weights ({weights}" in capsys.readouterr().out


@pytest.mark.parametrize("exact", ["--exact", "--no-exact"])
def test_a_quantised_model_is_held_to_its_own_weights(exact, tiny, few, tmp_path, capsys):
    model = write(tiny, tmp_path / "model.gguf", "Q8_0")
    how = ["--requests", "0", "--max-tokens", "12", "--budget", "0", "--against", "float32", exact, *few]
    assert main(["certify", str(model), "-d", "sam", *how]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The reference is these weights (Q8_0" in said
    assert "expanded to float32" in said


def test_transformers_is_certified_through_its_plug_in(tiny, few, capsys):
    how = ["--engine", "transformers", "--requests", "0", "--max-tokens", "12", "--budget", "0", "--dtype", "float32"]
    how += few
    assert main(["certify", str(tiny), "-d", "sam", *how]) == 0
    said = capsys.readouterr().out
    assert "peer:transformers-paceline,draft=sam,paced=false: Lossless, as far as was tested" in said
    assert "Not tested: " in said
