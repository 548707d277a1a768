"""Tools and reasoning through the server, by OpenAI's own client. What the model writes is scripted by a grammar."""

import json
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from paceline.errors import PacelineError
from paceline.logs.tool_calls import prepared
from paceline.serve.chats import Chats
from paceline.serve.prepare import _plain
from tests import models, native
from tests.serve.live import engine, serving, spelled

openai = pytest.importorskip("openai")
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    '{% for call in m.tool_calls or [] %}<tool_call>\n{{ \'{\' }}"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}{{ '}' }}\n</tool_call>{% endfor %}</s>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "the cat"}]
TAKES = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": TAKES}} for name in ("add", "sub")]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
SHAPE = {"type": "json_schema", "json_schema": {"name": "shape", "schema": TAKES}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make("qwen3", tmp_path_factory.mktemp("m") / "tiny", max_position_embeddings=2048, **native.TINY)


@pytest.fixture(scope="module")
def address(folder):
    made = engine(folder, max_batch=8)
    made.tokenizer.inner.chat_template = TEMPLATE
    with serving(made) as where:
        yield where


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


@pytest.fixture
def writes(monkeypatch):
    """Says what the model writes next. Nothing is drafted, so that it comes in small pieces."""

    def script(text):
        def grammar(chats, *_):
            return SimpleNamespace(allowed=spelled(chats.grammars, text).allowed)

        monkeypatch.setattr(Chats, "grammar", grammar)

    return script


def put_together(chunks):
    """Content, reasoning, calls, how it ended, and the number of log-probabilities of a stream."""
    content, reasoning, calls, reason, count = "", "", [], "", 0
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                calls.append((call.function.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.function.arguments)
        reason = choice.finish_reason or reason
        count += len(choice.logprobs.content) if choice.logprobs else 0
    return content, reasoning, calls, reason, count


ANSWERS = {
    "a call": (f"I add.\n{CALL}", {}, ("I add.", "", [("add", '{"x": 1}')], "tool_calls")),
    "two": (f"{CALL}\n{CALL}", {}, ("", "", [("add", '{"x": 1}')] * 2, "tool_calls")),
    "in elements": (XML, {}, ("", "", [("add", '{"x": 1}')], "tool_calls")),
    "one of two": (f"{CALL}\n{CALL}", {"parallel_tool_calls": False}, ("", "", [("add", '{"x": 1}')], "tool_calls")),
    "broken": (CALL.replace("1}}", "1,}}"), {}, (CALL.replace("1}}", "1,}}"), "", [], "stop")),
    "a number too large": (CALL.replace("1}}", "1e999}}"), {}, (CALL.replace("1}}", "1e999}}"), "", [], "stop")),
    "not offered": (CALL.replace("add", "rm"), {}, (CALL.replace("add", "rm"), "", [], "stop")),
    "no tools wanted": (CALL, {"tool_choice": "none"}, (CALL, "", [], "stop")),
    "reasoning": (f"<think>\n{CALL}</think>\n\nno", {}, ("no", CALL, [], "stop")),
    "reasoning, a call": (f"<think>so</think>{CALL}", {}, ("", "so", [("add", '{"x": 1}')], "tool_calls")),
    "begun by the template": (
        f"so\n</think>\n\n{CALL}", {"extra_body": {"enable_thinking": True}},
        ("", "so", [("add", '{"x": 1}')], "tool_calls"),
    ),
    "closed by the template": ("<think>", {"extra_body": {"enable_thinking": False}}, ("<think>", "", [], "stop")),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_whole_answers_and_streams_say_the_same(client, writes, case):
    text, more, expected = ANSWERS[case]
    writes(text)
    ask = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 200, "logprobs": True, **more}
    done = client.chat.completions.create(**ask)
    (choice,) = done.choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
    assert (message.content or "", reasoning, calls, choice.finish_reason) == expected
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert put_together(chunks) == (*expected, len(choice.logprobs.content))
    assert len(choice.logprobs.content) == done.usage.completion_tokens


def test_an_answer_goes_on_where_its_reasoning_was_cut(client, writes):
    writes("b</think>c")
    for said, expected in (("<think>a", ("c", "b")), ("x", ("b</think>c", None))):
        begun = [*USER, {"role": "assistant", "content": said}]
        done = client.chat.completions.create(
            model="tiny", messages=begun, max_tokens=40, extra_body={"continue_final_message": True}
        )
        message = done.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == expected
    with pytest.raises(openai.BadRequestError, match="does not appear in the chat") as caught:  # this template cuts it
        client.chat.completions.create(
            model="tiny", messages=[*USER, {"role": "assistant", "content": "<think>a</think>x"}], max_tokens=40,
            extra_body={"continue_final_message": True},
        )  # fmt: skip
    assert "\n" not in caught.value.body["message"]


def test_reasoning_is_read_under_either_name():
    said = {"role": "assistant", "content": "x", "reasoning": "why"}
    assert _plain([said]) == [{"role": "assistant", "content": "x", "reasoning_content": "why"}]


def test_text_comes_as_it_is_written_and_a_call_when_it_is_whole(client, writes):
    writes(f"Well. {CALL}")
    ask = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 200, "stream": True}
    chunks = list(client.chat.completions.create(**ask, extra_body={"draft": "none"}))
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) == 1
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 2


def prompt_of(address, body):
    """What the model reads of a request."""
    ask = {"messages": USER, "max_tokens": 1, "return_token_ids": True, **body}
    reply = httpx.post(f"{address}/v1/chat/completions", json=ask).json()
    assert "prompt_token_ids" in reply, reply
    return str(httpx.post(f"{address}/detokenize", json={"tokens": reply["prompt_token_ids"]}).json()["prompt"])


def test_a_model_reads_its_calls_as_it_wrote_them(client, address, writes):
    writes(CALL)
    (choice,) = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, max_tokens=200).choices
    earlier = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}
    assert f"<|assistant|>{CALL}</s><|tool|>3</s>" in prompt_of(address, {"messages": [*USER, earlier, result]})


@pytest.mark.parametrize(
    ("arguments", "reads"),
    [('{"a": "ü"}', '{"a": "ü"}'), ("", "{}"), ({"a": 1}, '{"a": 1}'), ("{broken", '"{broken"'), ("[1]", "[1]")],
)
def test_arguments_reach_the_template_as_what_they_are(address, arguments, reads):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert f'"arguments": {reads}}}' in prompt_of(address, {"messages": messages})


def test_a_message_with_no_calls_keeps_its_text(address):
    """Mistral's template and Llama's take it for a message of calls alone, whatever the list."""
    for none in ([], None):
        asked = [*USER, {"role": "assistant", "content": "a dog", "tool_calls": none, "refusal": None}, *USER]
        assert prompt_of(address, {"messages": asked}).count("a dog") == 1
        for reads in (True, False):
            (made,) = prepared([asked[1]], [], reads)[0]
            assert "tool_calls" not in made
            assert made["content"] == "a dog"


def test_templates_without_tools_and_templates_that_join_text():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    assert prepared(messages, [], False)[0] == [
        {"role": "assistant", "content": '{"name": "add", "arguments": {"x": 1}}'},
        {"role": "user", "content": "Result: 3"},
    ]
    arguments = prepared(messages, [], True)[0][0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"x": 1}
    assert f"```{arguments}" == "```" + arguments == '```{"x": 1}'
    for wrong in ("x", [1], [{"function": "x"}], [{}]):
        with pytest.raises(PacelineError, match="tool_calls is a list"):
            prepared([{"role": "assistant", "tool_calls": wrong}], [], True)


@pytest.mark.parametrize("choice", ["none", "required"])
@pytest.mark.parametrize("draft", ["none", "sam"])
def test_json_begins_after_the_reasoning(client, choice, draft):
    """Where the template has closed it, at once; where it has begun it, not before its end."""
    ask = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 60}
    ask |= {"response_format": SHAPE} if choice == "none" else {"tools": TOOLS, "tool_choice": choice}
    closed = client.chat.completions.create(**ask, extra_body={"enable_thinking": False, "draft": draft}).choices[0]
    text = closed.message.content or closed.message.tool_calls[0].function.arguments
    assert json.loads(text)["x"] in (1, 2)
    begun = client.chat.completions.create(**ask, extra_body={"enable_thinking": True, "draft": draft}).choices[0]
    assert (begun.finish_reason, begun.message.content) == ("length", None)  # this model never stops thinking
    assert len(begun.message.reasoning_content) > 20


def test_what_a_template_does_not_read_is_refused(address):
    ask = {"messages": USER, "max_tokens": 1, "reasoning_effort": "high"}
    reply = httpx.post(f"{address}/v1/chat/completions", json=ask)
    assert reply.status_code == 400
    assert "reasoning_effort is not read by this model's chat template" in reply.json()["error"]["message"]
    assert prompt_of(address, {"enable_thinking": True}).endswith("<think>\n")
    assert prompt_of(address, {"reasoning_effort": "none"}).endswith("</think>\n\n")


MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}}
LATE = {"type": "object", "properties": {"a": MANY}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_fails_ends_as_an_error(address, stream):
    ask = {"messages": USER, "max_tokens": 60, "stream": stream, "enable_thinking": False}
    forms = [{"type": "json_schema", "json_schema": {"schema": schema}} for schema in (MANY, {"$ref": "#"}, LATE)]
    url = f"{address}/v1/chat/completions"
    replies = [httpx.post(url, json={**ask, "response_format": form}) for form in forms]
    assert [reply.status_code for reply in replies] == [400, 400, 200 if stream else 500]
    assert all("cannot be kept to" in reply.json()["error"]["message"] for reply in replies[:2])
    if stream:
        *_, error, end, done = [line[6:] for line in replies[2].text.splitlines() if line]
        assert (json.loads(end)["choices"][0]["finish_reason"], done) == ("error", "[DONE]")
    else:
        error = replies[2].text
    assert "grammar failed" in json.loads(error)["error"]["message"]
