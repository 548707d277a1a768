"""What users get wrong: one line that says what was wrong, on standard error, and a status that is not 0."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tests import models
from tests.cli.command import Command


def _changed(model: Path, folder: Path, **entries: object) -> Path:
    """A copy of a model folder with other entries in its config.json."""
    shutil.copytree(model, folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    return folder / "model"


def _complains(command: Command, *arguments: object, of: tuple[str, ...], stdin: str = "") -> None:
    result = command("generate", *arguments, stdin=stdin)
    assert result.code == 2, result
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    for words in of:
        assert words in line


def test_a_path_that_does_not_exist(command: Command, tmp_path: Path) -> None:
    (tmp_path / "smollm").mkdir()
    _complains(command, tmp_path / "smolm", "hi", of=("smolm", "Did you mean 'smollm'"))


def test_a_hub_name_without_a_connection(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    _complains(command, "nobody/nothing-7b", "hi", of=("error: 'nobody/nothing-7b'", "no connection"))


def test_memory_that_is_no_size_or_too_little(command: Command, tiny: Path) -> None:
    _complains(command, tiny, "hi", "--cache-memory", "2 apples", of=("cache_memory is '2 apples'", "such as 2GB"))
    _complains(command, tiny, "hi", "--cache-memory", "9kB", of=("need", "cache_memory is 9 kB", "give it more"))


def test_a_folder_that_is_no_model(command: Command, tmp_path: Path) -> None:
    _complains(command, tmp_path, "hi", of=(str(tmp_path), "config.json"))


def test_weights_cut_off(command: Command, tiny: Path, tmp_path: Path) -> None:
    model = _changed(tiny, tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    _complains(command, model, "hi", of=("model.safetensors", "damaged"))
    weights.write_bytes(b"not at all")
    _complains(command, model, "hi", of=("model.safetensors",))


def test_weights_of_another_shape(command: Command, tiny: Path, tmp_path: Path) -> None:
    model = _changed(tiny, tmp_path, intermediate_size=100)
    _complains(command, model, "hi", of=("shape", "96", "100"))


def test_a_tokenizer_larger_than_the_vocabulary(command: Command, tiny: Path, tmp_path: Path) -> None:
    model = _changed(tiny, tmp_path, vocab_size=200)
    models.rewrite(model, lambda name, tensor: tensor[:200] if tensor.shape[0] == 320 else tensor)
    _complains(command, model, "hi", of=("287", "199"))


def test_an_unknown_method_or_option(command: Command, tiny: Path) -> None:
    _complains(command, tiny, "hi", "--draft", "samm", of=("'samm'", "Did you mean 'sam'", "prompt-lookup"))
    _complains(command, tiny, "hi", "--draft", "sam,drft=3", of=("'drft'", "Did you mean 'draft'", "min_match"))
    _complains(command, tiny, "hi", "--draft", "sam,draft=x", of=("draft", "'x'", "a whole number"))


def test_a_method_is_checked_before_the_model_is_read(command: Command, tmp_path: Path) -> None:
    _complains(command, tmp_path / "nowhere", "hi", "--draft", "samm", of=("'samm'",))


def test_an_unknown_dtype_or_device(command: Command, tiny: Path) -> None:
    _complains(command, tiny, "hi", "--dtype", "bfloat61", of=("'bfloat61'", "bfloat16"))
    _complains(command, tiny, "hi", "--device", "abacus", of=("'abacus'", "cpu"))


@pytest.mark.parametrize("how", ["--raw", "--chat"])
def test_an_empty_prompt(command: Command, tiny: Path, how: str) -> None:
    _complains(command, tiny, "", how, of=("empty",))
    _complains(command, tiny, "-", how, stdin="\n", of=("empty",))


def test_a_blank_prompt_is_nothing_to_chat_about(command: Command, tiny: Path) -> None:
    _complains(command, tiny, "  ", of=("blank", "--raw"))
    assert command("generate", tiny, "  ", "--raw", "-n", 1).code == 0


def test_no_prompt_or_two(command: Command, tiny: Path, tmp_path: Path) -> None:
    _complains(command, tiny, of=("no prompt", "--prompts"))
    _complains(command, tiny, "hi", "--prompts", tmp_path / "x", of=("both",))


def test_a_prompt_longer_than_the_context(command: Command, tiny: Path) -> None:
    _complains(command, tiny, "the cat " * 200, of=("tokens", "128"))


def test_a_prompts_file_that_is_missing_or_empty(command: Command, tiny: Path, tmp_path: Path) -> None:
    _complains(command, tiny, "--prompts", tmp_path / "none.jsonl", of=("none.jsonl", "No such file"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    _complains(command, tiny, "--prompts", tmp_path / "empty.jsonl", of=("empty.jsonl", '{"prompt"'))


def test_standard_input_that_is_not_text(command: Command, tiny: Path) -> None:
    result = command("generate", tiny, "-", stdin=b"\xff\xfe")
    assert (result.code, result.out) == (2, "")
    assert "UTF-8" in result.err


def test_sampling_options_out_of_range(command: Command, tiny: Path) -> None:
    _complains(command, tiny, "hi", "--top-p", 0, of=("top_p", "above 0"))
    _complains(command, tiny, "hi", "--max-tokens", 0, of=("max_tokens", "1 or more"))


def test_an_option_that_does_not_exist(command: Command, tiny: Path) -> None:
    _complains(command, tiny, "hi", "--drafft", "sam", of=("--drafft", "--draft", "paceline generate --help"))
    result = command("generat")
    assert result.code == 2
    assert result.err.startswith("error: No such command 'generat'. Did you mean 'generate'?")


@pytest.mark.parametrize("more", [(), ("--temperature", "1"), ("--compare",), ("--json",)])
def test_logits_that_are_not_numbers(command: Command, tiny: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    model = _changed(tiny, tmp_path)
    models.rewrite(model, lambda name, tensor: tensor * torch.nan if name == "model.norm.weight" else tensor)
    _complains(command, model, "hi", *more, of=("NaN", "weights"))


def test_a_bug_of_ours_keeps_its_traceback(command: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.engine.engine

    def broken(self: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(paceline.engine.engine.Engine, "step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        command("generate", tiny, "hi")


def test_ctrl_c_prints_what_was_generated(endless: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "paceline", "generate", endless, "the cat", "--ignore-eos", "-n", "40000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert running.stdout is not None
    begun = os.read(running.stdout.fileno(), 1 << 16)
    running.send_signal(signal.SIGINT)
    rest, err = running.communicate(timeout=60)
    assert begun
    assert running.returncode == 130
    assert (begun + rest).endswith(b"\n")
    statistics, notice = err.decode().splitlines()
    assert 1 <= int(statistics.split()[0]) < 40_000
    assert statistics.endswith("stopped")
    assert notice.startswith("interrupted")


def test_ctrl_c_in_a_file_of_prompts_keeps_whole_objects(
    command: Command, endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "the cat", "max_tokens": 3, "ignore_eos": true}']
    lines += ['{"prompt": "the dog", "max_tokens": 40000, "ignore_eos": true}'] * 3
    path.write_text("\n".join(lines))
    write, presses = sys.stdout.write, iter([signal.SIGINT])

    def pressing(text: str) -> int:
        """Ctrl-C as soon as a line is out."""
        written = write(text)
        if "\n" in text and (pressed := next(presses, None)):
            signal.raise_signal(pressed)
        return written

    monkeypatch.setattr(sys.stdout, "write", pressing)
    result = command("generate", endless, "-p", path, "--batch", 2, "--json")
    assert result.code == 130
    records = [json.loads(line) for line in result.out.splitlines()]
    reasons = [r["finish_reason"] for r in records]
    assert reasons in (["length", "abort"], ["length", "abort", "abort"])  # the third may or may not have begun
    assert 1 <= records[1]["new_tokens"] < 40_000
    assert "interrupted" in result.err
