"""Heads whose matrices are in blocks of eight and four bits: the target is untouched, so the text is its own."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from paceline.core.request import Completion
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.target.decoder import Decoder
from paceline.target.load import load
from paceline.target.quantised.blocks import Blocks
from tests.paths import REPOSITORY

MODELS = REPOSITORY / "models"
NEW = 14
PROMPTS = ("What is the capital of France?", "Write two sentences about the sea.")


@cache
def demo() -> Decoder:
    """The demo model in blocks; every answer of it is the same in any draft, bit for bit."""
    target = load(MODELS / "demo", dtype="int4")
    target.make_exact()
    assert isinstance(target, Decoder)
    return target


def answers(target: Decoder, draft: str) -> list[Completion]:
    assert target.tokenizer is not None
    chats = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    wish = SamplingParams(temperature=0.8, max_tokens=NEW, seed=5)
    return Engine(target, draft, max_batch=2, exact=True).generate(chats, wish)


def tokens(out: list[Completion]) -> list[list[int]]:
    return [one.tokens for one in out]


def accepted(out: list[Completion]) -> int:
    return sum(sum(one.stats.accepted[1:]) for one in out)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_text_of_a_quantised_target_is_its_own(method: str) -> None:
    target = demo()
    plain = answers(target, "none")
    out = answers(target, f"{method}:{MODELS / f'demo-{method}'},dtype=int4")
    assert tokens(out) == tokens(plain)
    assert accepted(out) > 0


@pytest.mark.parametrize(("bits", "own"), [(16, 16), (8, 8), (None, 8)])
def test_heads_round_their_inputs_as_their_target_does(bits: int | None, own: int) -> None:
    from paceline.draft.models.layers import placed

    class Target:
        device, dtype, activations = torch.device("cpu"), torch.float32, bits

    blocks = placed({"fc.weight": torch.ones(32, 64)}, Target(), "int8")["fc.weight"]  # type: ignore[arg-type]
    assert isinstance(blocks, Blocks)
    assert blocks.activations == own


def test_blocks_are_refused_where_nothing_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.draft.models.layers import placed

    class Elsewhere:
        device = type("device", (), {"type": "cuda", "__str__": lambda self: "cuda:0"})()

    with pytest.raises(MethodError, match="run on CPUs, not on cuda:0"):
        placed({}, Elsewhere(), "int8")  # type: ignore[arg-type]
