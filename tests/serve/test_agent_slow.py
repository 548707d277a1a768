"""A real model in an agent's loop: it calls tools, and reads its own calls back as it wrote them.

PACELINE_AGENT is a model whose chat template knows tools, such as Qwen2.5-Coder-1.5B-Instruct as GGUF:

    PACELINE_AGENT=qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf pytest -n 0 -s -m slow tests/serve/test_agent_slow.py
"""

import json
import os
from pathlib import Path

import pytest

from paceline.target.load import load_tokenizer
from tests.serve.process import started

pytestmark = pytest.mark.slow
openai = pytest.importorskip("openai")
STOCK = {"apples": 12, "pears": 7, "plums": 30, "figs": 4, "nuts": 250}
TAKES = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "stock", "description": "How many of an item are in stock.", "parameters": TAKES},
    }
]
ASK = {"model": "agent", "temperature": 0, "max_tokens": 60, "extra_body": {"return_token_ids": True}}


@pytest.mark.timeout(1800)
def test_five_turns_with_tools():
    """The first call is the model's own idea, and the others are asked for: a small model soon answers without."""
    name = os.environ.get("PACELINE_AGENT")
    if name is None:
        pytest.skip("PACELINE_AGENT is not set")
    tokenizer = load_tokenizer(Path(name))
    with started(Path(name), "--name", "agent") as (_, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", timeout=900)
        messages = [{"role": "system", "content": "You are a shop's assistant. Look up numbers with the tool."}]
        wrote = []
        for turn, (item, count) in enumerate(STOCK.items()):
            messages.append({"role": "user", "content": f"How many {item} do we have?"})
            choice = "required" if turn else "auto"
            (done,) = client.chat.completions.create(**ASK, messages=messages, tools=TOOLS, tool_choice=choice).choices
            assert done.finish_reason == "tool_calls", done.message.content
            (call,) = done.message.tool_calls
            assert json.loads(call.function.arguments) == {"item": item}
            wrote.append(tokenizer.decode(done.token_ids))
            messages += [done.message, {"role": "tool", "tool_call_id": call.id, "content": str(count)}]
            reply = client.chat.completions.create(**ASK, messages=messages, tools=TOOLS, tool_choice="none")
            prompt = tokenizer.inner.decode(reply.prompt_token_ids)
            print(f"turn {turn + 1}: {wrote[-1]!r}, then {reply.choices[0].message.content!r}")
            for earlier, text in zip(STOCK, wrote, strict=False):
                rendered = f'{{"name": "stock", "arguments": {{"item": "{earlier}"}}}}'
                assert prompt.count(f"<tool_call>\n{rendered}\n</tool_call>") == 1
                assert "\n" in text or text == rendered  # on one line it is letter by letter what the model wrote
            assert str(count) in reply.choices[0].message.content
            messages.append(reply.choices[0].message)
