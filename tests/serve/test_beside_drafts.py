"""What works beside drafts: the table of docs/serve.md, of which every row names the test that shows it here.

    python -m tests.serve.test_beside_drafts        # writes the table

What other engines do is what the threads named in its rows say; it was looked up on 2026-11-27."""

import json
import re
from importlib import import_module
from pathlib import Path
from time import sleep

import httpx2 as httpx
import pytest

from paceline.engine.engine import Engine
from paceline.serve.fields import PARAMETERS, ChatRequest, TextRequest
from tests.serve.live import engine, serving

PAGE = Path(__file__).parents[2] / "docs/serve.md"
BEGIN, END = "<!-- beside drafts -->\n", "<!-- /beside drafts -->"
ENGINES = {
    "vLLM": "vllm-project/vllm", "SGLang": "sgl-project/sglang", "llama.cpp": "ggml-org/llama.cpp",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
}  # fmt: skip
HOT = {"temperature": 0.4, "seed": 3}
PROMPT = "the cat and the dog and the cat and the dog and the cat"
SHAPE = {"type": "object", "properties": {"a": {"enum": ["xxxxxxxx"]}, "b": {"type": "array",
         "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}}, "required": ["a", "b"],
         "additionalProperties": False}  # fmt: skip
JSON = {"type": "json_schema", "json_schema": {"schema": SHAPE}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SHAPE}}

ASKS = {
    "greedy": {"temperature": 0}, "temperature": {"temperature": 1.1, "seed": 1}, "top_p": {**HOT, "top_p": 0.7},
    "top_k": {**HOT, "top_k": 5}, "min_p": {**HOT, "min_p": 0.1}, "presence_penalty": {**HOT, "presence_penalty": 0.7},
    "frequency_penalty": {**HOT, "frequency_penalty": 0.4}, "repetition_penalty": {**HOT, "repetition_penalty": 1.2},
    "logit_bias": {**HOT, "logit_bias": {"40": 3}}, "seed": HOT, "n": {**HOT, "n": 3},
    "stop": {"temperature": 0, "stop": ["s"]}, "stop_token_ids": {**HOT, "stop_token_ids": [60, 61]},
    "ignore_eos": {**HOT, "ignore_eos": True, "logit_bias": {"1": 4}},
    "min_tokens": {**HOT, "min_tokens": 9, "logit_bias": {"1": 4}}, "max_tokens": {"temperature": 0, "max_tokens": 7},
    "logprobs": {**HOT, "logprobs": True, "top_logprobs": 3}, "response_format": {**HOT, "response_format": JSON},
    "on_length": {**HOT, "response_format": JSON, "on_length": "close", "max_tokens": 34},
    "tools": {**HOT, "tools": [TOOL]}, "tool_choice": {**HOT, "tools": [TOOL], "tool_choice": "required"},
    "prediction": {"temperature": 0, "prediction": {"type": "content", "content": PROMPT}},
    "cache_salt": {**HOT, "cache_salt": "a"},
}  # fmt: skip
"""Beside these a request is answered with drafts as without."""


@pytest.fixture(scope="module")
def model(folder):
    return f"model:{folder},stop=fixed,draft=3"


@pytest.fixture(scope="module")
def http(folder, model):
    made = engine(folder, ("sam", "suffix", model), max_batch=4, exact=True)
    with serving(made, json_whitespace="none", audit=1.0) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def plainly(folder):
    """A server that drafts nothing, not even what a grammar forces."""
    made = Engine(str(folder), "none", dtype="float32", device="cpu", threads=1, max_batch=4, exact=True)
    with serving(made, json_whitespace="none") as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def told(http, more):
    """(what the answer says, tokens drafted for it)."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, **more}
    count = r"^paceline:spec_decode_num_draft_tokens_total (\S+)"
    before = re.search(count, http.get("/metrics").text, re.M)[1]
    made = http.post("/v1/chat/completions", json=body)
    assert made.status_code == 200, made.text
    after = re.search(count, http.get("/metrics").text, re.M)[1]
    return made, float(after) - float(before)


@pytest.mark.parametrize("name", ASKS)
def test_answers_are_those_without_drafts(http, plainly, model, name):
    """Token by token, greedily and with a seed, whatever drafts."""
    seen = 0
    for ask in (ASKS[name], ASKS[name] | {"temperature": 0}):
        plain, none = told(plainly, ask)
        assert not none
        for draft in ("sam", "suffix", model):
            made, drafted = told(http, ask | {"draft": draft})
            assert texts(made.json()) == texts(plain.json())
            seen += drafted
    assert seen
    while (audit := http.get("/audit").json())["backlog_tokens"]:
        sleep(0.01)
    assert audit["answers"]["mismatch"] == audit["answers"]["impossible"] == 0, audit["alarms"]


@pytest.mark.parametrize("name", ["seed", "tool_choice", "response_format"])
def test_a_stream_says_the_same(http, plainly, name):
    whole, _ = told(plainly, ASKS[name])
    made, drafted = told(http, {**ASKS[name], "stream": True, "stream_options": {"include_usage": True}})
    parts = [json.loads(line[6:]) for line in made.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for part in parts for choice in part["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    [choice] = whole.json()["choices"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
    said = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    assert "".join(call.get("arguments") or "" for call in calls) == "".join(call["arguments"] for call in said)
    assert parts[-1]["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
    assert drafted


def test_a_reused_prefix_changes_nothing(http, plainly):
    first, _ = told(plainly, HOT)
    told(http, {**HOT, "cache_salt": "new"})
    again, drafted = told(http, {**HOT, "cache_salt": "new"})
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert texts(again.json()) == texts(first.json())
    assert drafted


def texts(answer):
    choices = json.loads(re.sub(r'"id": "[^"]*"', "", json.dumps(answer["choices"])).replace("{, ", "{"))
    return choices, answer["usage"]["completion_tokens"]


# The table ------------------------------------------------------------------------------------------------------------

SAME = "test_beside_drafts.test_answers_are_those_without_drafts"
ROWS = [
    ("`temperature`, `top_p`, `top_k`", (SAME, "test_accept.test_warped_or_not"), {"vLLM": "yes, #13933"}),
    ("`min_p`", (SAME, "test_accept.test_warped_or_not"), {
        "vLLM": "400, #42744; being mended, #42802", "TensorRT-LLM": "refused, #17701",
    }),
    ("`presence_penalty`, `frequency_penalty`, `repetition_penalty`", (SAME,), {
        "vLLM": "yes, #19482; ignored before, #18902",
        "SGLang": "nearly, #22049; ignored before",
        "TensorRT-LLM": "with `enable_penalty`, not for trees, #17701; ignored before",
    }),
    ("`logit_bias`", (SAME,), {"vLLM": "400, #42744", "SGLang": "yes, #22049; ignored before"}),
    ("`seed`", (SAME, "test_accept.test_a_seed_gives_the_tokens_of_plain_decoding"), {
        "vLLM": "a bug that was closed, #6038", "TensorRT-LLM": "without one requests share their noise, #19487",
    }),
    ("`n`", (SAME,), {}),
    ("`stop`", (SAME,), {
        "vLLM": "ids and `logprobs` go on behind it, #47616",
        "SGLang": "yes, #23802; missed near `max_tokens`, #31599",
    }),
    ("`stop_token_ids`, `ignore_eos`, `min_tokens`, `max_tokens`", (SAME,), {}),
    ("`logprobs`, `top_logprobs`", (SAME, "test_accept.test_logprobs_are_the_targets_own_whatever_warps_the_choice"), {
        "vLLM": "yes, #26060; turned drafts off before, #34497", "SGLang": "not in its second version, #19761",
        "llama.cpp": "0.0 for every token, #27972",
    }),
    ("`response_format`", (SAME, "test_beside_drafts.test_a_stream_says_the_same"), {
        "vLLM": "yes, #14702; wrong at the end of reasoning before #44297",
        "SGLang": "gets stuck, #9187; not in its second version, #13019",
        "llama.cpp": "in its example, #2991",
        "TensorRT-LLM": "asked for and closed, #7006; trees leave the grammar, #18892",
    }),
    ("`on_length`", (SAME,), {}),
    ("`tools`, `tool_choice`", (SAME,), {}),
    ("`stream`", ("test_beside_drafts.test_a_stream_says_the_same",), {"vLLM": "calls lost arguments, mended, #41967"}),
    ("`prediction`", (SAME,), {}),
    ("reused prefixes, `cache_salt`", (SAME, "test_beside_drafts.test_a_reused_prefix_changes_nothing"), {
        "vLLM": "wrong answers of hybrids, #53912",
    }),
]  # fmt: skip
MODULES = {"test_accept": "tests.test_accept", "test_beside_drafts": __name__}
OTHERS = {"model", "draft", "messages", "prompt", "suffix", "echo", "add_special_tokens", "stream_options",
          "return_token_ids", "chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "enable_thinking",
          "verbosity", "cache_prompt", "cache_control", "add_generation_prompt",
          "continue_final_message", "parallel_tool_calls", "max_completion_tokens", "user", "metadata",
          "safety_identifier", "prompt_cache_key", "store", "service_tier", "modalities"}  # fmt: skip
"""Fields that shape a prompt, or how an answer is written down."""


def table():
    """What works here, and a row for each thing that was looked up in another engine."""
    lines = ["| works here | the test that shows it |", "|---|---|"]
    for what, tests, _ in ROWS:
        names = ", ".join(f"`{test.partition('.')[2]}`" for test in tests)
        lines.append(f"| {what} | {names} |")
    lines += ["", "| in another engine | | what its thread says |", "|---|---|---|"]
    for name, where in ENGINES.items():
        lines += [f"| {name} | {what} | {linked(others[name], where)} |" for what, _, others in ROWS if name in others]
    return "\n".join(lines) + "\n"


def linked(cell, where):
    return re.sub(r"#(\d+)", rf"[{where.partition('/')[2]}#\1](https://github.com/{where}/issues/\1)", cell)


def test_the_table_is_on_the_page_and_every_row_has_its_test():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), "python -m tests.serve.test_beside_drafts writes it"
    fields = set(re.findall(r"`([a-z_]+)`", " ".join(what for what, _, _ in ROWS)))
    assert fields | OTHERS >= {*ChatRequest.model_fields, *TextRequest.model_fields, *PARAMETERS}
    for what, tests, _ in ROWS:
        for test in tests:
            module, _, name = test.partition(".")
            assert callable(getattr(import_module(MODULES[module]), name))
        if SAME in tests:
            assert set(re.findall(r"`([a-z_]+)`", what)) <= {*ASKS, "top_logprobs"}


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
