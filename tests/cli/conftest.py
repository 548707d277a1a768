"""The command line as its users meet it: arguments in; exit status, standard output and standard error out."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import models

from paceline.cli import main


@dataclass
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `paceline` with these arguments, in this process."""

    def run(*arguments: object, stdin: str | bytes = b"") -> Result:
        raw = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


def make(folder: Path, **changes: Any) -> Path:
    """A random Llama with a chat template whose next token hangs mostly on the last one, so that it soon repeats
    itself and drafts are accepted."""
    models.make("llama2", folder, **changes)
    rewrite(folder, lambda name, tensor: tensor * 0.01 if "o_proj" in name or "down_proj" in name else tensor)
    return folder


def rewrite(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Change the weights in a model folder."""
    file = folder / "model.safetensors"
    weights = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context of 128 tokens."""
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for an answer that nobody waits for."""
    return make(tmp_path_factory.mktemp("endless"), max_position_embeddings=50_000)
