"""/v1/responses by OpenAI's own client: text, streams, tools and structured output; what is not kept is refused."""

import json

import httpx2 as httpx
import pytest

from paceline.core.sampling import SamplingParams
from paceline.serve.fields import Strict
from paceline.serve.items import ItemsRequest
from tests.serve.live import engine, serving
from tests.serve.test_tools import CALL, TAKES, TEMPLATE, USER, address, client, folder, prompt_of, writes

openai = pytest.importorskip("openai")
__all__ = ["address", "client", "folder", "writes"]
ADD = {"type": "function", "name": "add", "description": "adds", "parameters": TAKES, "strict": True}
NAME, ALLOWED = {"type": "function", "name": "add"}, {"type": "allowed_tools"}
FORM = {"format": {"type": "json_schema", "name": "shape", "schema": TAKES, "strict": True}}
ANSWERS = {
    "text": ("the cat.", [("message", "the cat.")]),
    "a call": (f"I add.\n{CALL}", [("message", "I add."), ("function_call", '{"x": 1}')]),
    "two": (f"{CALL}\n{CALL}", [("function_call", '{"x": 1}')] * 2),
    "a broken call": (CALL.replace("1}}", "1,}}"), [("message", CALL.replace("1}}", "1,}}"))]),
    "reasoning": (f"<think>so</think>{CALL}", [("reasoning", "so"), ("function_call", '{"x": 1}')]),
    "reasoning, text": ("<think>so</think>yes", [("reasoning", "so"), ("message", "yes")]),
}


def said(item):
    return item.type, item.arguments if item.type == "function_call" else item.content[0].text


@pytest.mark.parametrize("case", ANSWERS)
def test_whole_answers_and_streams_say_the_same(client, writes, case):
    text, expected = ANSWERS[case]
    writes(text)
    ask = {"model": "tiny", "input": "the cat", "tools": [ADD], "max_output_tokens": 200}
    whole = client.responses.create(**ask)
    assert [said(item) for item in whole.output] == expected
    assert (whole.status, whole.error, whole.store) == ("completed", None, False)
    assert whole.output_text == "".join(text for kind, text in expected if kind == "message")
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == case.startswith("reasoning")
    assert all(item.name == "add" for item in whole.output if item.type == "function_call")
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [said(item) for item in events[-1].response.output] == expected
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens
    for i, (_, part) in enumerate(expected):
        own = [event for event in events if getattr(event, "output_index", None) == i]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert "".join(event.delta for event in own if event.type.endswith("delta")) == part
        assert said(own[-1].item) == (expected[i][0], part)
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {own[0].item.id}


def test_the_clients_own_helpers(client, writes):
    writes(f"I add.\n{CALL}")
    with client.responses.stream(model="tiny", input="the cat", tools=[ADD], max_output_tokens=200) as stream:
        made = stream.get_final_response()
    assert [said(item) for item in made.output] == [("message", "I add."), ("function_call", '{"x": 1}')]


def test_a_conversation_of_items_is_a_chat(address, client, writes):
    """What came back is sent again, with the call's result, and read as the same chat."""
    writes(f"<think>so</think>I add.\n{CALL}")
    ask = {"model": "tiny", "input": "the cat", "tools": [ADD], "max_output_tokens": 200}
    first = client.responses.create(**ask, store=False, include=["reasoning.encrypted_content"])  # as LiteLLM asks
    items = [{"role": "user", "content": [{"type": "input_text", "text": "the cat"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    call = first.output[-1].call_id
    items.append({"type": "function_call_output", "call_id": call, "output": "3"})
    request = ItemsRequest.model_validate({"input": items, "instructions": "be kind", "max_output_tokens": 1}).chat()
    messages = request.messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert (messages[2]["content"], messages[2]["reasoning_content"]) == ("I add.", "so")
    assert (messages[2]["tool_calls"][0]["id"], messages[3]["tool_call_id"]) == (call, call)
    assert f"<|assistant|>I add.{CALL}</s><|tool|>3</s>" in prompt_of(address, {"messages": messages})


def test_the_answer_is_the_chats(folder):
    made = engine(folder)
    made.tokenizer.inner.chat_template = TEMPLATE
    expected = made.generate([USER], SamplingParams(temperature=0, max_tokens=12))[0]
    with serving(made) as where:
        http = openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0)
        for _ in range(2):
            done = http.responses.create(model="tiny", input="the cat", temperature=0, max_output_tokens=12)
            assert done.output_text == expected.text
            assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        ask = {"model": "tiny", "input": "the cat", "temperature": 0, "max_output_tokens": 12}
        *_, last = http.responses.create(**ask, stream=True)
        assert (last.type, last.response.output_text) == ("response.incomplete", expected.text)
        made.step = None  # the engine fails
        *_, last = http.responses.create(model="tiny", input="the cat", stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")


@pytest.mark.parametrize("choice", ["required", NAME, "text", {**ALLOWED, "mode": "required", "tools": [NAME]}])
def test_structured_output(client, choice):
    ask = {"model": "tiny", "input": "the cat", "temperature": 0, "extra_body": {"enable_thinking": False}}
    more = {"text": FORM} if choice == "text" else {"tools": [ADD], "tool_choice": choice}
    (item,) = client.responses.create(**ask, **more, max_output_tokens=60).output
    assert json.loads(said(item)[1])["x"] in (1, 2)


@pytest.mark.parametrize(("more", "says"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id is not a field"),
    ({"conversation": {"id": "x"}}, "conversation is not a field"),
    ({"prompt": {"id": "x"}}, "prompt is not a field"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"include": ["message.output_text.logprobs"]}, "include.0: Input should be 'reasoning.encrypted_content'"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "file_search"}]}, "tools.0: Input tag 'file_search'"),
    ({"input": []}, "input is empty"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0 is of type 'item_reference'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0: content of type input_image"),
    ({"input": [{"type": "function_call", "name": "add"}]}, "input.0: arguments is missing"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "role is 'wizard'"),
    ({"input": [{"role": "user", "content": "x"}] * 3000}, "--limit messages=N"),
    ({"max_output_tokens": "12"}, "max_output_tokens"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tools has: add"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_kept_is_refused(address, more, says, stream):
    reply = httpx.post(f"{address}/v1/responses", json={"input": "the cat", **more, "stream": stream}, timeout=60)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


def test_every_parameter_of_openai_is_a_field_or_refused_by_name(address):
    from openai.types.responses import response_create_params as known

    names = set(known.ResponseCreateParamsBase.__annotations__) - set(ItemsRequest.model_fields)
    assert {"previous_response_id", "conversation"} <= names
    for name in sorted(names):
        reply = httpx.post(f"{address}/v1/responses", json={"input": "x", name: "x"})
        assert f"{name} is not a field" in reply.json()["error"]["message"]
    assert issubclass(ItemsRequest, Strict)
