"""Clients that people use, whole and streaming, with tools and structured output. What the model says is scripted.

Their packages are looked for in an environment of their own, where PACELINE_CLIENTS says so:

    python -m venv ENV && ENV/bin/pip install openai-agents langchain-openai litellm
    PACELINE_CLIENTS=ENV/bin/python pytest -n 0 -m slow tests/serve/test_clients_slow.py
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.serve.chats import Chats
from tests.serve.live import spelled
from tests.serve.test_tools import address, folder

pytestmark = pytest.mark.slow
__all__ = ["address", "folder"]

# What runs in the clients' environment: each takes the address of the API, and how the model is made to call f --------


def agents(url, call):
    import asyncio

    import agents as sdk
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    asked = []

    @sdk.function_tool
    def f(x):
        asked.append(x)
        return "seen"

    sdk.set_tracing_disabled(True)
    for kind in (sdk.OpenAIResponsesModel, sdk.OpenAIChatCompletionsModel):
        model = kind(model="tiny", openai_client=AsyncOpenAI(base_url=url, api_key="any", max_retries=0))
        agent = sdk.Agent(name="a", instructions="Be kind.", model=model, tools=[f])

        async def runs(agent=agent, model=model):
            done = await sdk.Runner.run(agent, call)
            assert done.final_output == "It is so."
            more = [*done.to_input_list(), {"role": "user", "content": "say: yes"}]
            assert (await sdk.Runner.run(agent, more)).final_output == "yes"
            streamed = sdk.Runner.run_streamed(agent, call)
            kinds = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
            assert kinds == ["tool_called", "tool_output", "message_output_created"]
            typed = sdk.Agent(name="b", model=model, output_type=Person)
            assert (await sdk.Runner.run(typed, 'say: {"name": "Tom"}')).final_output == Person(name="Tom")
            other = sdk.Agent(name="c", model=model, handoffs=[agent])
            done = await sdk.Runner.run(other, call.replace('"f"', '"transfer_to_a"').replace('{"x": 1}', "{}"))
            assert done.last_agent.name == "a"

        asyncio.run(runs())
    assert asked == [1] * 4


def langchain_openai(url, call):
    import asyncio

    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    @tool
    def f(x):
        """Sees."""
        return "seen"

    for responses in (False, True):
        model = ChatOpenAI(model="tiny", base_url=url, api_key="any", max_retries=0, use_responses_api=responses)
        assert model.invoke("say: yes").text == "yes"
        assert "".join(chunk.text for chunk in model.stream("say: yes and no")) == "yes and no"
        assert [one.text for one in model.batch(["say: a", "say: b"])] == ["a", "b"]
        bound = model.bind_tools([f])
        chunks = list(bound.stream(call))
        for said in (bound.invoke(call), sum(chunks[1:], start=chunks[0])):
            assert said.tool_calls[0]["args"] == {"x": 1}
            talk = [("user", call), said, f.invoke(said.tool_calls[0])]
            assert bound.invoke(talk).text == "It is so."
        thought = model.invoke("say: <think>so</think>yes")
        assert (thought.text, model.invoke([thought, ("user", "say: no")]).text) == ("yes", "no")
        json = '{"name": "Tom"}'
        named = f'{{"name": "Person", "arguments": {json}}}'
        for method, text in (("json_schema", json), ("json_mode", json), ("function_calling", named)):
            assert model.with_structured_output(Person, method=method).invoke(f"say: {text}") == Person(name="Tom")
        refusal = ""
        try:
            model.invoke("long " * 3000)
        except ContextOverflowError as error:
            refusal = str(error)
        assert "too long" in refusal
    model = ChatOpenAI(model="tiny", base_url=url, api_key="any", logprobs=True, top_logprobs=2)
    scored = asyncio.run(model.ainvoke("say: yes"))
    assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def litellm(url, call):
    import asyncio

    import litellm as lite

    def asks(text, **more):
        to = {"api_base": url, "api_key": "any", "num_retries": 0}
        return {**to, "messages": [{"role": "user", "content": text}], "max_tokens": 200, **more}

    tool = {"name": "f", "description": "sees", "parameters": {"type": "object", "properties": {"x": {}}}}
    nested, flat = {"type": "function", "function": tool}, {"type": "function", **tool}
    for model in ("openai/tiny", "hosted_vllm/tiny"):
        assert lite.completion(model, **asks("say: yes")).choices[0].message.content == "yes"
        assert asyncio.run(lite.acompletion(model, **asks("say: yes"))).choices[0].message.content == "yes"
        chunks = list(lite.completion(model, **asks("say: <think>so</think>yes", stream=True)))
        whole = lite.stream_chunk_builder(chunks).choices[0].message
        assert (whole.content, whole.reasoning_content) == ("yes", "so")
        said = lite.completion(model, **asks(call, tools=[nested])).choices[0].message
        assert said.tool_calls[0].function.arguments == '{"x": 1}'
        asked = asks(call, tools=[nested])
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "seen"}
        asked["messages"] += [said.model_dump(), result]
        assert lite.completion(model, **asked).choices[0].message.content == "It is so."
        to = {"api_base": url, "api_key": "any", "model": model}
        assert lite.responses(input="say: yes", **to).output[0].content[0].text == "yes"
        assert lite.responses(input=call, tools=[flat], **to).output[0].arguments == '{"x": 1}'
        *_, last = lite.responses(input="say: yes", stream=True, **to)
        assert last.type == "response.completed"
        said = asyncio.run(lite.anthropic_messages(model=model, **asks("say: yes")))
        assert said["content"][-1]["text"] == "yes"
        refusal = ""
        try:
            lite.completion(model, **asks("long " * 3000))
        except lite.ContextWindowExceededError as error:
            refusal = str(error)
        assert "too long" in refusal


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", [agents, langchain_openai, litellm])
def test_a_client(address, monkeypatch, client):
    def grammar(chats, request, *_):
        text = str(request.messages[-1]["content"])
        text = "It is so." if text == "seen" else text.partition("say: ")[2]
        return SimpleNamespace(allowed=spelled(chats.grammars, text).allowed)

    monkeypatch.setattr(Chats, "grammar", grammar)
    call = 'say: <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    source = f"from typing import Any\n{inspect.getsource(client)}\n{client.__name__}({address + '/v1'!r}, {call!r})"
    python = os.environ.get("PACELINE_CLIENTS", sys.executable)
    done = subprocess.run([python, "-c", source], capture_output=True, text=True, check=False)
    if f"No module named '{client.__name__.partition('_')[0]}" in done.stderr:
        pytest.skip(f"{client.__name__} is not installed in the environment of {python}")
    assert done.returncode == 0, done.stderr[-3000:]
