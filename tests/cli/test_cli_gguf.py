"""GGUF files and weights of fewer bits, as users of the command line meet them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import Command
from tests.gguf_files import write


def test_a_file_is_generated_from_like_a_folder(command: Command, tiny: Path, tmp_path: Path) -> None:
    path = write(tiny, tmp_path / "m.gguf")
    asked = ("the cat and the dog and the cat", "--raw", "-n", "20", "--ignore-eos", "--dtype", "float32")
    ours, own = command("generate", path, *asked), command("generate", tiny, *asked)
    assert ours.code == own.code == 0
    assert ours.out == own.out
    unknown = write(tiny, tmp_path / "unknown.gguf", pre="nobody-knows")
    refusal = command("generate", unknown, *asked)
    assert refusal.code == 2
    assert "'nobody-knows', and gpt-2, llama-bpe, qwen2, smollm are known" in refusal.err
    assert "--tokenizer PATH" in refusal.err
    assert command("generate", unknown, *asked, "--tokenizer", tiny).out == own.out
    noted = command("generate", write(tiny, tmp_path / "q.gguf", "Q8_0"), *asked)
    assert noted.err.startswith("q has its weights in Q8_0, 8.5 bits a weight")


def test_a_model_is_quantised_once(command: Command, tiny: Path, tmp_path: Path) -> None:
    asked = ("the cat and the dog", "--raw", "-n", "20", "--ignore-eos")
    made = command("quantize", tiny, tmp_path / "four", "--dtype", "int4")
    assert (made.code, made.err) == (0, "")
    assert "MB of weights" in made.out
    runs = ((tmp_path / "four", ()), (tiny, ("--dtype", "int4")))
    loaded, own = (command("generate", model, *asked, *how) for model, how in runs)
    assert loaded.out == own.out
    assert "another model than in 16 bits, and drafting does not change what it says" in own.err
    assert json.loads(command("generate", tiny, *asked, "--dtype", "int4", "--json").out)["new_tokens"] == 20
    again = command("quantize", tiny, tmp_path / "four")
    assert again.code == 2
    assert again.err.startswith("error:")
    assert "exists already" in again.err
    assert command("quantize", tiny, tmp_path / "new", "--dtype", "int5").code == 2
