"""The prompts that README, documentation and --help show: the demo model answers them and stops, without a loop."""

import re

import pytest

from paceline import Engine, SamplingParams
from tests.paths import REPOSITORY

PLACES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "src" / "paceline" / "cli").glob("*.py")),
]
COMMAND = re.compile(r'paceline generate (?!smollm2)\S+ "([^"]+)"')
SHOWN = sorted({prompt for place in PLACES for prompt in COMMAND.findall(place.read_text("utf-8"))})


def test_prompts_are_shown_in_the_readme_and_in_help() -> None:
    assert len(SHOWN) >= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_demo_model_answers_what_is_shown_without_a_loop(dtype: str) -> None:
    engine = Engine(REPOSITORY / "models" / "demo", dtype=dtype)
    chats = [[{"role": "user", "content": prompt}] for prompt in SHOWN]
    answers = engine.generate(chats, SamplingParams(max_tokens=256))
    assert {prompt: answer.finish_reason for prompt, answer in zip(SHOWN, answers, strict=True)} == dict.fromkeys(
        SHOWN, "stop"
    )
    assert [answer.text for answer in answers if not answer.text.strip()] == []
    assert [answer.text for answer in answers if repeats(answer.text)] == []


def repeats(text: str) -> bool:
    """Whether three words in a row come again later in an answer: the demo model's short loops that do end."""
    words = text.split()
    triples = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return len(triples) != len(set(triples))
