"""Fixtures of the command line: the command itself, and models for it."""

import io
import sys

import pytest
from tests import models
from tests.cli.command import Result

from paceline.cli import main


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs `paceline` with these arguments, in this process."""

    def run(*arguments, stdin=b""):
        raw = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def _few_turns(monkeypatch):
    """Comparisons are timed twice."""
    monkeypatch.setattr("paceline.cli.compare.TURNS", 2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model with a context of 128 tokens."""
    return models.make_repetitive(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory):
    """A model with room for an answer that nobody waits for."""
    return models.make_repetitive(tmp_path_factory.mktemp("endless"), max_position_embeddings=50_000)
