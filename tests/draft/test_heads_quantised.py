"""Heads whose matrices are in blocks of eight and four bits: the target is untouched, so the text is its own."""

from __future__ import annotations

from functools import cache

import pytest

from paceline.engine.engine import Engine
from paceline.engine.request import Completion
from paceline.engine.sampling import SamplingParams
from paceline.errors import MethodError
from paceline.target.decoder import Decoder
from paceline.target.load import load
from tests.paths import REPOSITORY

MODELS = REPOSITORY / "models"
NEW = 24
METHODS = ("eagle", "eagle3", "medusa", "hydra", "amphista", "kangaroo")
PROMPTS = ("What is the capital of France?", "Write two sentences about the sea.")


@cache
def demo(dtype: str = "float32") -> Decoder:
    """The demo model; every answer of it is the same in any draft, bit for bit."""
    target = load(MODELS / "demo", dtype=dtype)
    target.make_exact()
    assert isinstance(target, Decoder)
    return target


def answers(target: Decoder, draft: str, temperature: float = 0.0) -> tuple[Engine, list[Completion]]:
    assert target.tokenizer is not None
    chats = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    engine = Engine(target, draft, max_batch=2, exact=True)
    wish = SamplingParams(temperature=temperature, max_tokens=NEW, seed=5)
    return engine, engine.generate(chats, wish)


def tokens(out: list[Completion]) -> list[list[int]]:
    return [one.tokens for one in out]


def accepted(out: list[Completion]) -> int:
    return sum(sum(one.stats.accepted[1:]) for one in out)


@pytest.mark.parametrize("method", METHODS)
def test_text_is_the_targets_and_the_head_reads_less(method: str) -> None:
    plain = tokens(answers(demo(), "none")[1])
    whole, out = answers(demo(), f"{method}:{MODELS / f'demo-{method}'}")
    engine, fewer = answers(demo(), f"{method}:{MODELS / f'demo-{method}'},dtype=int8")
    assert tokens(out) == tokens(fewer) == plain
    assert accepted(fewer) >= 0.85 * accepted(out) > 0
    # Of kangaroo's the target's own first layers are most, and of medusa's and eagle's the target's head.
    most = {"kangaroo": 0.99, "medusa": 0.9, "eagle": 0.8}.get(method, 0.6)
    assert engine.drafter.weight_bytes < most * whole.drafter.weight_bytes


@pytest.mark.parametrize("method", ["eagle", "eagle3", "hydra"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_of_a_quantised_target_is_its_own(method: str, temperature: float) -> None:
    target = demo("int4")
    _, plain = answers(target, "none", temperature)
    _, out = answers(target, f"{method}:{MODELS / f'demo-{method}'},dtype=int4", temperature)
    assert tokens(out) == tokens(plain)
    assert accepted(out) > 0


def test_blocks_are_refused_where_nothing_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.draft.neural.layers import placed

    class Elsewhere:
        device = type("device", (), {"type": "cuda", "__str__": lambda self: "cuda:0"})()

    with pytest.raises(MethodError, match="run on CPUs, not on cuda:0"):
        placed({}, Elsewhere(), "int8")  # type: ignore[arg-type]
