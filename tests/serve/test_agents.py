"""What coding agents send, as it was recorded from them, and how each API writes the answer. What the model writes is
scripted by a grammar; `test_agent_slow` and `test_clients_slow` run the clients themselves."""

import json
import logging
from time import monotonic, sleep
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from paceline.core.request import Completion, RowStats
from paceline.errors import PacelineError
from paceline.serve import chats, said, streams
from paceline.serve.fields import ChatRequest
from paceline.serve.items import ItemsRequest
from paceline.serve.messages import MessagesRequest
from paceline.serve.ollama import Lines, OllamaRequest
from paceline.serve.tools import thinking
from tests.serve.live import engine, serving
from tests.serve.test_tools import CALL, TAKES, TEMPLATE, folder, writes  # noqa: F401

RECORDED = [
    "claude-code-messages", "claude-code-router-reasoning", "codex-client-metadata", "codex-custom-call-in-history",
    "codex-first-turn", "codex-two-developers", "mini-user-after-user", "no-max-tokens-small-memory",
    "opencode-title-two-users", "tool-with-cache-control",
]  # fmt: skip
"""First requests of agents, and those that were refused once."""
KINDS = {"chat/completions": ChatRequest, "responses": ItemsRequest, "messages": MessagesRequest}
ADD = {"name": "add", "input_schema": TAKES}
CALLED = {"type": "tool_use", "name": "add", "input": {"x": 1}}
BROKEN = CALL.replace("1}}", "1,}}")
ANSWERS = {
    "text": ("the cat.", "end_turn", [{"type": "text", "text": "the cat."}]),
    "a call": (f"I add.\n{CALL}", "tool_use", [{"type": "text", "text": "I add."}, CALLED]),
    "two": (f"{CALL}\n{CALL}", "tool_use", [CALLED, CALLED]),
    "the beginning of a mark": ("a <tool_", "end_turn", [{"type": "text", "text": "a <tool_"}]),
    "a broken call": (BROKEN, "end_turn", [{"type": "text", "text": BROKEN}]),
    "thinking": (
        f"<think>so</think>{CALL}", "tool_use", [{"type": "thinking", "thinking": "so", "signature": ""}, CALLED],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def address(folder):  # noqa: F811
    made = engine(folder, max_batch=8)
    made.tokenizer.inner.chat_template = TEMPLATE
    with serving(made, also=("*",), api_keys=("key",)) as where:
        yield where


@pytest.fixture(scope="module")
def http(address):
    with httpx.Client(base_url=address, headers={"x-api-key": "key"}, timeout=60) as client:
        yield client


@pytest.fixture
def notices(caplog):
    """What the server says once."""
    said.once.cache_clear()
    caplog.set_level(logging.INFO, "paceline.serving")
    return lambda: [record.getMessage() for record in caplog.records if "drafted" not in record.getMessage()]


def recorded(shared, name):
    made = json.loads((shared / "design" / "agents" / f"{name}.json").read_text())
    route = made["route"].partition("?")[0].removeprefix("/v1/")
    return route, made["body"]


def streamed(reply):
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def whole_text(route, made):
    if route == "messages":
        return "".join(block["text"] for block in made["content"])
    if route == "responses":
        return "".join(part["text"] for item in made["output"] for part in item["content"])
    return made["choices"][0]["message"]["content"]


def streamed_text(route, events):
    if route == "chat/completions":
        return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    return "".join(
        event["delta"] if route == "responses" else event["delta"].get("text", "")
        for event in events if event["type"] in ("response.output_text.delta", "content_block_delta")
    )  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_request_is_answered(http, shared, writes, name):  # noqa: F811
    route, body = recorded(shared, name)
    writes("the cat.")
    whole = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    made = http.post(f"/v1/{route}", json=whole)
    assert made.status_code == 200, made.text
    text = whole_text(route, made.json())
    assert text == ("the cat." if body.get("max_tokens") != 2 else "the cat."[: len(text)]) != ""
    events = streamed(http.post(f"/v1/{route}?beta=true", json={**body, "stream": True}))
    assert streamed_text(route, events) == text


def test_a_mark_of_a_cache_does_not_reach_the_template(http):
    tool = {"type": "function", "function": {"name": "a", "parameters": TAKES}}
    marked = {**tool, "cache_control": {"type": "ephemeral"}}
    plain, same = (http.post("/tokenize", json={**ASK, "tools": [one]}).json() for one in (tool, marked))
    assert plain["tokens"] == same["tokens"]


def chat_of(shared, name):
    route, body = recorded(shared, name)
    return KINDS[route].model_validate(body).chat()


def test_what_the_model_reads_of_them(shared, notices):
    first = chat_of(shared, "codex-first-turn")
    assert [one.function.name for one in first.tools] == ["exec_command", "spawn"]
    assert [message["role"] for message in first.messages] == ["developer", "developer", "user", "user"]
    made = chat_of(shared, "codex-custom-call-in-history").messages[-2:]
    patch = json.dumps({"input": "*** Begin Patch\n*** End Patch"})
    call = {"id": "c1", "type": "function", "function": {"name": "apply_patch", "arguments": patch}}
    assert made[0]["tool_calls"] == [call]
    assert made[1] == {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    for _ in range(2):
        claude = chat_of(shared, "claude-code-messages")
    assert [message["role"] for message in claude.messages] == ["system", "user", "system"]
    assert claude.messages[0]["content"].startswith("Rule 1")
    assert claude.messages[1]["content"] == "<system-reminder>filler</system-reminder>explain shapes.py"
    said_once = ["tools of type 'web_search' cannot run here, and are left out", "x-anthropic-billing-header"]
    assert len(notices()) == 2
    assert all(what in line for what, line in zip(said_once, notices(), strict=True))


# Responses, as codex speaks them ------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "add", "parameters": TAKES}}
FLAT = {"type": "function", "name": "add", "parameters": TAKES}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}
SPACE = {"type": "namespace", "name": "mcp__a__", "tools": [FLAT, {**CUSTOM, "name": "send"}]}
NAMED = {
    "add": ({"x": 1}, {"type": "function_call", "name": "add", "arguments": '{"x": 1}'}),
    "mcp__a__add": (
        {"x": 1}, {"type": "function_call", "name": "add", "namespace": "mcp__a__", "arguments": '{"x": 1}'},
    ),
    "patch": ({"input": "a\nb"}, {"type": "custom_tool_call", "name": "patch", "input": "a\nb"}),
    "send": ({"input": "a"}, {"type": "custom_tool_call", "name": "send", "namespace": "mcp__a__", "input": "a"}),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_calls_are_answered_under_their_names(http, writes, name):  # noqa: F811
    """And sent back, they are read as the model wrote them."""
    arguments, expected = NAMED[name]
    writes(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")
    body = {"input": "the cat", "tools": [FLAT, CUSTOM, SPACE, {"type": "local_shell"}], "max_output_tokens": 200}
    (item,) = http.post("/v1/responses", json=body).json()["output"]
    own = {key: value for key, value in item.items() if key not in ("id", "call_id", "status")}
    assert (own, item["status"]) == (expected, "completed")
    events = streamed(http.post("/v1/responses", json={**body, "stream": True}))
    (done,) = events[-1]["response"]["output"]
    assert {**done, "id": "", "call_id": ""} == {**item, "id": "", "call_id": ""}
    text = "input" if "input" in item else "arguments"
    deltas = [event["delta"] for event in events if event["type"].endswith(f"{text}.delta")]
    assert "".join(deltas) == item[text]
    assert next(event for event in events if event["type"].endswith(f"{text}.done"))[text] == item[text]
    again = ItemsRequest.model_validate({**body, "input": [{"role": "user", "content": "x"}, item]}).chat()
    function = again.messages[-1]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == (name, arguments)


def test_a_custom_call_that_is_no_text_is_none(http, writes):  # noqa: F811
    text = '<tool_call>\n{"name": "patch", "arguments": {"x": 1}}\n</tool_call>'
    writes(text)
    body = {"input": "the cat", "tools": [CUSTOM], "max_output_tokens": 200}
    assert whole_text("responses", http.post("/v1/responses", json=body).json()) == text


def test_an_image_in_a_tools_output_is_a_line_and_elsewhere_is_refused(http):
    image, text = {"type": "input_image", "image_url": "data:,x"}, {"type": "input_text", "text": "a"}
    result = {"type": "function_call_output", "call_id": "c", "output": [text, image]}
    chat = ItemsRequest.model_validate({"input": [{"role": "user", "content": [text]}, result]}).chat()
    assert chat.messages[-1]["content"] == "a[an image, which this model cannot read]"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}, block]}
    again = MessagesRequest.model_validate({"messages": [{"role": "user", "content": [result]}]}).chat()
    assert again.messages[-1]["content"] == chat.messages[-1]["content"]
    for route, body in (
        ("responses", {"input": [{"role": "user", "content": [image]}]}),
        ("messages", {"messages": [{"role": "user", "content": [block]}]}),
    ):
        refused = http.post(f"/v1/{route}", json=body)
        assert refused.status_code == 400
        assert "image is not supported" in refused.json()["error"]["message"]
        assert "\n" not in refused.json()["error"]["message"]


# Messages -----------------------------------------------------------------------------------------------------------


def put_together(events):
    """Content, stop reason and usage of a stream, whose order is checked."""
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    content, is_open = [], False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(content))
            content.append(dict(event["content_block"]))
            text, is_open = "", True
        elif event["type"] == "content_block_delta":
            assert is_open
            kind, *rest = event["delta"].values()
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "input"}.get(kind)
            text += rest[0]
            if name:
                content[-1][name] = text
        else:
            assert event == {"type": "content_block_stop", "index": len(content) - 1}
            is_open = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(text)
    return content, events[-2]["delta"], events[-2]["usage"]


def without_ids(content):
    return [{key: value for key, value in block.items() if key != "id"} for block in content]


@pytest.mark.parametrize("case", ANSWERS)
def test_messages_and_their_streams_say_the_same(http, writes, case):  # noqa: F811
    text, reason, expected = ANSWERS[case]
    writes(text)
    body = {"model": "any", "messages": [{"role": "user", "content": case}], "tools": [ADD], "max_tokens": 200}
    http.post("/v1/messages", json=body)
    whole = http.post("/v1/messages", json=body).json()
    assert (whole["type"], whole["role"], without_ids(whole["content"])) == ("message", "assistant", expected)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, None)
    events = streamed(http.post("/v1/messages", json={**body, "stream": True}))
    assert events[0]["message"]["content"] == []
    content, delta, usage = put_together(events)
    assert without_ids(content) == expected
    assert delta == {"stop_reason": reason, "stop_sequence": None}
    assert usage == whole["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"] > 0  # the same was asked before
    count = http.post("/v1/messages/count_tokens", json={key: body[key] for key in ("messages", "tools")}).json()
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert count["input_tokens"] == events[0]["message"]["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "expected"), [
    ({"max_tokens": 2}, ("max_tokens", None)), ({}, ("end_turn", None)),
    ({"stop_sequences": ["zz", "and"]}, ("stop_sequence", "and")),
])
def test_why_a_message_ended(http, writes, more, expected, stream):  # noqa: F811
    writes("the cat and the dog")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, **more, "stream": stream}
    reply = http.post("/v1/messages", json=body)
    made = put_together(streamed(reply))[1] if stream else reply.json()
    assert (made["stop_reason"], made["stop_sequence"]) == expected


def test_a_message_that_came_back_is_read_as_it_was_written(http, writes):  # noqa: F811
    writes(f"<think>so</think>I add.\n{CALL}")
    body = {"messages": [{"role": "user", "content": "the cat"}], "tools": [ADD], "max_tokens": 200}
    content = http.post("/v1/messages", json=body).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "3"}
    said_then = [result, {"type": "text", "text": "go on"}]
    turns = [{"role": "assistant", "content": content}, {"role": "user", "content": said_then}]
    chat = MessagesRequest.model_validate({**body, "messages": [*body["messages"], *turns]}).chat()
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "user"]
    own = chat.messages[1]
    assert (own["content"], own["reasoning_content"]) == ("I add.", "so")
    assert (own["tool_calls"][0]["id"], chat.messages[2]["content"]) == (chat.messages[2]["tool_call_id"], "3")
    prefilled = {"messages": [*body["messages"], {"role": "assistant", "content": "I"}]}
    assert MessagesRequest.model_validate(prefilled).chat().continue_final_message


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_message_that_must_call(http, choice):
    body = {"messages": [{"role": "user", "content": "the cat"}], "tools": [ADD], "tool_choice": choice}
    body |= {"max_tokens": 400, "temperature": 0, "thinking": {"type": "disabled"}}
    made = http.post("/v1/messages", json=body).json()
    assert made["stop_reason"] == "tool_use", made
    assert made["content"][0]["input"]["x"] in (1, 2)


def test_json_in_a_message(http):
    form = {"type": "json_schema", "schema": TAKES}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 0}
    body |= {"output_config": {"format": form}, "thinking": {"type": "disabled"}}
    (block,) = http.post("/v1/messages", json=body).json()["content"]
    assert json.loads(block["text"])["x"] in (1, 2)


ASK = {"messages": [{"role": "user", "content": "x"}]}
FIRST = {"responses": {"input": "x", "max_output_tokens": 1}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "says"), [
    ({"mcp_servers": []}, "mcp_servers is not a field"),
    ({"max_tokens": "12"}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "it can be user, assistant or system"),
    ({"messages": [{"role": "user", "content": [1]}]}, "a list of content blocks"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "give it a name and an input_schema"),
    ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [ADD]}, "tools has: add"),
    ({"output_config": {"effort": "max"}}, "is not read by this model's chat template"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"messages": [{"role": "user", "content": "long " * 9000}]}, "too long"),
    (None, "x-api-key"),
])
def test_refusals_in_anthropics_form(http, more, says, stream):
    status, kind = (401, "authentication_error") if more is None else (400, "invalid_request_error")
    for route in ("messages", "messages/count_tokens"):
        keys = {"x-api-key": "wrong"} if more is None else {}
        reply = http.post(f"/v1/{route}", json={**ASK, **(more or {}), "stream": stream}, headers=keys)
        error = reply.json()
        assert (reply.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
        assert says in error["error"]["message"]


@pytest.mark.parametrize("route", KINDS)
def test_a_bug_is_an_error_in_the_form_of_the_api(address, monkeypatch, route):
    def fails(*_):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(chats.Chats, "prompted", fails)
    reply = httpx.post(f"{address}/v1/{route}", json=FIRST.get(route, ASK), headers={"x-api-key": "key"})
    error = reply.json()["error"]
    assert (reply.status_code, error.pop("message")) == (500, "the server failed at this request; its log says why")
    if route == "messages":
        assert (reply.json()["type"], error) == ("error", {"type": "api_error"})
    else:
        assert ("type" in reply.json(), error) == (False, {"type": "server_error", "param": None, "code": None})


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_an_error_is_one_line_whatever_was_sent(lenient, notices, route):
    message = {"role": "user", "content": [{"type": "a\n\x1b\u2028b"}]}
    body = {"input" if route == "responses" else "messages": [message], "o\n\x1bdd": 1}
    said_of_it = lenient.post(f"/v1/{route}", json=body).json()["error"]["message"]
    assert "content of type a   b is not supported" in said_of_it
    assert "o  dd is not a field that this server supports, and is ignored" in notices()
    for odd in ({"tools": [{"type": "a" * 3000}]}, {"tool_choice": {"type": "a" * 3000}}):
        assert len(lenient.post(f"/v1/{route}", json=body | odd).json()["error"]["message"]) < 600


def test_the_first_thing_that_claude_code_asks(http):
    assert http.head("/").status_code == 200
    missing = http.get("/v1/messages/batches").json()
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")


def test_a_key_in_either_header(address):
    bearer = {"Authorization": "Bearer key"}
    for headers in ({"x-api-key": "key"}, bearer, {"Authorization": "Bearer no", "x-api-key": "key"}):
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "no"}, {"x-api-key": ""}, {"Authorization": "Basic key"}):
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 401


# Ollama's chats -----------------------------------------------------------------------------------------------------


def ollamas(content):
    """Content blocks of Anthropic's as a message of Ollama's."""
    texts = {block["type"]: block.get("text") or block.get("thinking") for block in content}
    calls = [{"function": {"name": one["name"], "arguments": one["input"]}} for one in content if "input" in one]
    made = {"thinking": texts.get("thinking"), "tool_calls": calls}
    made = {name: value for name, value in made.items() if value}
    return {"role": "assistant", "content": texts.get("text", ""), **made}


@pytest.mark.parametrize("case", ANSWERS)
def test_ollamas_chats_and_their_streams_say_the_same(http, writes, case):  # noqa: F811
    text, _, content = ANSWERS[case]
    writes(text)
    body = {"model": "any", **ASK, "tools": [FUNCTION], "options": {"num_predict": 200, "num_ctx": 4096}}
    whole = http.post("/api/chat", json={**body, "stream": False, "keep_alive": "5m"}).json()
    assert whole["message"] == ollamas(content)
    assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "stop", "tiny")
    assert whole["prompt_eval_count"] > 0 < whole["eval_count"]
    reply = http.post("/api/chat", json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    said = {"role": "assistant"}
    for message in (line["message"] for line in lines):
        said |= {name: said.get(name, type(value)()) + value for name, value in message.items() if name != "role"}
    assert said == whole["message"]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("stop", whole["eval_count"])


def test_ollamas_times_are_in_nanoseconds():
    lines = Lines(SimpleNamespace(settings=SimpleNamespace(model="tiny")))
    told = json.loads(lines.end(0, Completion(0, "", [5, 6], 3, "length", 1.5, RowStats(), []), [], False))
    assert [told[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")] == [1.5e9, 0, 0, 1.5e9]
    assert (told["done_reason"], told["prompt_eval_count"], told["eval_count"]) == ("length", 3, 2)


def test_what_ollamas_clients_send_back_is_read_as_it_was_written():
    turns = [ollamas(ANSWERS["thinking"][2]), {"role": "tool", "tool_name": "add", "content": "3"}]
    chat = OllamaRequest.model_validate({"messages": [*ASK["messages"], *turns], "think": "low"}).chat()
    own, result = chat.messages[1:]
    function = {"name": "add", "arguments": {"x": 1}}
    assert (own["reasoning_content"], own["tool_calls"][0]["function"]) == ("so", function)
    assert (result["name"], result["content"], chat.reasoning_effort) == ("add", "3", "low")
    assert OllamaRequest.model_validate({**ASK, "think": False}).chat().enable_thinking is False
    for most, tokens in ((7, 7), (-1, None), (-2, None)):
        assert OllamaRequest.model_validate({**ASK, "options": {"num_predict": most}}).chat().max_tokens == tokens


@pytest.mark.parametrize("form", ["json", TAKES, ""])
def test_json_in_ollamas_chats(http, form):
    body = {**ASK, "format": form, "stream": False, "options": {"num_predict": 60, "temperature": 0}, "think": False}
    made = http.post("/api/chat", json=body).json()
    assert made["done_reason"] == "stop" or form != TAKES
    assert made["message"]["content"].startswith("{") == bool(form)


def test_what_ollamas_clients_ask_first(http):
    assert [one["name"] for one in http.get("/api/tags").json()["models"]] == ["tiny"]
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["tiny"]
    shown = http.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["paceline.context_length"] == 2048
    assert http.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(("route", "body", "status", "says"), [
    ("chat", {"messages": []}, 400, "messages"), ("chat", {**ASK, "options": {"mirostat": 1}}, 400, "options.mirostat"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, 400, "images are not supported"),
    ("chat", {**ASK, "think": "max"}, 400, "reasoning_effort is not read"), ("show", {"model": 1}, 400, "model"),
    ("chat", {**ASK, "options": {"num_predict": 0}}, 400, "max_tokens"), ("generate", {}, 404, "POST /api/generate"),
    ("chat", {"messages": [{"role": "user", "content": "long " * 9000}]}, 400, "too long"),
])
def test_refusals_in_ollamas_form(http, route, body, status, says):
    reply = http.post(f"/api/{route}", json=body)
    assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert says in reply.json()["error"]
    assert "\n" not in reply.json()["error"]


# Fields of chats ----------------------------------------------------------------------------------------------------

ALL = "enable_thinking reasoning_effort verbosity"
WAYS = [
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ALL, {"enable_thinking": True}),
    ({"thinking": {"type": "disabled"}}, ALL, {"enable_thinking": False}),
    ({"thinking": {"type": "adaptive"}}, ALL, {}),
    ({"thinking": {"type": "adaptive"}}, "", {}),
    ({"thinking": {"type": "disabled"}}, "", None),  # the model thinks, and cannot be told not to
    ({"thinking": {"type": "enabled"}}, "", {}),
    ({"reasoning": {"effort": "high"}}, ALL, {"reasoning_effort": "high"}),
    ({"reasoning": {"effort": "high", "enabled": False}}, ALL, {"enable_thinking": False}),
    ({"reasoning": {"effort": "high"}}, "", None),
    ({"reasoning": {"effort": "medium", "summary": "auto"}}, "", {}),
    ({"reasoning": {"effort": "none"}}, "enable_thinking", {"enable_thinking": False}),
    ({"reasoning_effort": "low"}, ALL, {"reasoning_effort": "low"}),
    ({"reasoning_effort": "low"}, "", None),
    ({"verbosity": "low"}, ALL, {"verbosity": "low"}),
    ({"verbosity": "low"}, "", None),
    ({"verbosity": "medium"}, "", {}),
]


@pytest.mark.parametrize(("more", "template", "expected"), WAYS)
def test_thinking_is_asked_for_in_many_ways(more, template, expected, notices):
    request = ChatRequest.model_validate({**ASK, **more})
    if expected is not None:
        assert thinking(request, template, True) == expected
        return
    (name,) = more
    with pytest.raises(PacelineError, match=f"{name} is not read by this model's chat template; leave it out"):
        thinking(request, template, True)
    for _ in range(2):
        assert thinking(request, template, True, refuse=False) == {}
    assert notices() == [f"{name} is not read by this model's chat template, and is ignored"]
    assert thinking(ChatRequest.model_validate({**ASK, "thinking": {"type": "disabled"}}), "", False) == {}


NEEDLESS = [
    ("chat/completions", "service_tier", "flex"), ("chat/completions", "cache_prompt", False),
    ("chat/completions", "modalities", ["text", "audio"]), ("chat/completions", "reasoning", {"summary": "detailed"}),
    ("responses", "service_tier", "priority"), ("responses", "truncation", "auto"),
    ("responses", "include", ["message.output_text.logprobs", "web_search_call.results"]),
    ("responses", "reasoning", {"summary": "concise"}),
    ("responses", "stream_options", {"include_obfuscation": True}),
    ("messages", "service_tier", 1),
    ("messages", "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
]
"""Values that ask for what is not there, and without which the answer is the same."""
NEEDED = [
    ("chat/completions", "tool_choice", "must"), ("chat/completions", "n", "2"), ("chat/completions", "store", True),
    ("chat/completions", "thinking", {"type": "odd"}), ("responses", "store", True), ("responses", "background", True),
    ("responses", "text", {"format": {"type": "odd"}}), ("responses", "previous_response_id", "resp_1"),
    ("responses", "conversation", {"id": "x"}), ("responses", "prompt", {"id": "x"}),
    ("messages", "thinking", {"type": "odd"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def lenient(folder):  # noqa: F811
    with serving(engine(folder), lenient=True) as where, httpx.Client(base_url=where, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("route", "name", "value"), NEEDLESS + NEEDED)
def test_what_a_lenient_server_ignores_is_what_changes_no_answer(http, lenient, route, name, value):
    body = {**FIRST.get(route, {**ASK, "max_tokens": 1}), name: value}
    strict, ignored = (one.post(f"/v1/{route}", json=body) for one in (http, lenient))
    assert strict.status_code == 400
    assert ignored.status_code == (200 if (route, name, value) in NEEDLESS else 400), ignored.text


def test_a_lenient_server_and_its_names(folder, notices):  # noqa: F811
    made = engine(folder)
    made.tokenizer.inner.chat_template = TEMPLATE
    tool = {"type": "function", "function": {"name": "f", "parameters": TAKES, "odd": 1}, "odd": 2}
    wrong = {"odd": 1, "tools": [tool], "chat_template_kwargs": {"new": 1}, "reasoning_effort": "high"}
    with serving(made, lenient=True, also=("b",)) as where, httpx.Client(base_url=where, timeout=60) as asked:
        for model in ("tiny", "b", "b"):
            reply = asked.post("/v1/chat/completions", json={**ASK, **wrong, "model": model, "max_tokens": 1})
            assert reply.status_code == 200, reply.text
        space = {**SPACE, "tools": [{**FLAT, "odd": 1, "defer_loading": True}]}
        flat = {"tools": [{**FLAT, "odd": 1}, {**CUSTOM, "odd": 1}, space], "max_output_tokens": 1}
        assert asked.post("/v1/responses", json={"input": "x", **flat}).status_code == 200
        odd = {"odd": {"a": 1}, "tools": [{**ADD, "odd": 1}], "max_tokens": 1}
        assert asked.post("/v1/messages", json={**ASK, **odd}).status_code == 200
        assert asked.post("/v1/chat/completions", json={**ASK, "n": "2"}).status_code == 400
        refused = asked.post("/v1/chat/completions", json={**ASK, "model": "c"})
        assert "this server has 'tiny', 'b'" in refused.json()["error"]["message"]
        assert [one["id"] for one in asked.get("/v1/models").json()["data"]] == ["tiny", "b"]
        assert asked.get("/v1/models/b").json()["id"] == "b"
    lines = notices()
    for name in ("odd", "tools.0.odd", "tools.0.function.odd", "'new' in chat_template_kwargs", "reasoning_effort"):
        assert sum(line.startswith(f"{name} is not") for line in lines) == 1, lines


# Signs of life ------------------------------------------------------------------------------------------------------

STREAMS = {
    "chat/completions": (ASK | {"max_tokens": 8}, ": ping"),
    "completions": ({"prompt": "x", "max_tokens": 8}, ": ping"),
    "responses": ({"input": "x", "max_output_tokens": 8}, "event: response.in_progress"),
    "messages": (ASK | {"max_tokens": 8}, "event: ping"),
}


@pytest.fixture
def slow(folder, monkeypatch):  # noqa: F811
    """A server whose first round takes a second, and which pings four times a second."""
    made = engine(folder, max_batch=1)
    step, rounds = made.step, []

    def slowly():
        rounds.append(sleep(0 if rounds else 1.0))
        return step()

    made.step = slowly
    monkeypatch.setattr(streams, "PING_SECONDS", 0.25)
    with serving(made) as where, httpx.Client(base_url=where, timeout=60) as client:
        yield client


@pytest.mark.parametrize("route", STREAMS)
@pytest.mark.parametrize("several", [False, True])
def test_a_stream_shows_that_it_lives(slow, notices, route, several):
    """While a prompt is read, and where an answer waits for its turn: at once, and then again and again."""
    body, ping = STREAMS[route]
    if several and not route.endswith("completions"):
        pytest.skip("this API has one answer a request")
    began, times = monotonic(), []
    with slow.stream("POST", f"/v1/{route}", json={**body, "stream": True, **({"n": 2} if several else {})}) as reply:
        lines = []
        for line in reply.iter_lines():
            assert lines or (reply.status_code, monotonic() - began < 0.9) == (200, True)  # before the first round ends
            lines.append(line)
            times += [monotonic()] if line == ping else []
    assert len(times) >= 2 + (route == "responses")  # whose beginning looks alike
    assert lines[0] != ping or route == "responses"  # it does not wait for the first sign
    last = [i for i, line in enumerate(lines) if line == ping][-1]
    assert not any('"error": {' in line for line in lines)
    if route == "responses":  # codex passes over comments, and over events without data
        assert json.loads(lines[last + 1][6:])["response"]["status"] == "in_progress"
    else:
        assert lines[last + 1] == ("" if ping.startswith(":") else 'data: {"type": "ping"}')
    assert any("of a prompt read" in line or "waits" in line for line in notices())


@pytest.mark.parametrize("route", STREAMS)
def test_a_stream_that_speaks_has_no_other_signs_of_life(folder, monkeypatch, route):  # noqa: F811
    made = engine(folder)
    step = made.step
    made.step = lambda: (sleep(0.1), step())[1]
    monkeypatch.setattr(streams, "PING_SECONDS", 1.0)
    body = {**STREAMS[route][0], "draft": "none", "stream": True}
    body |= {"max_output_tokens": 16} if route == "responses" else {"max_tokens": 16}
    with serving(made) as where:
        lines = httpx.post(f"{where}/v1/{route}", json=body, timeout=60).text.splitlines()
    assert lines.count(STREAMS[route][1]) == (route == "responses")  # which begins with such an event


def test_a_stream_of_lines_shows_that_it_lives(slow):
    lines = slow.post("/api/chat", json=ASK | {"options": {"num_predict": 8}}).text.splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert messages[:3] == [{"role": "assistant", "content": ""}] * 3


@pytest.mark.parametrize(("route", "asked", "sign", "call"), [
    ("chat/completions", {**ASK, "tools": [FUNCTION]}, '"delta": {"content": ""}', '"tool_calls": [{'),
    ("messages", {**ASK, "tools": [ADD]}, "event: ping", '"type": "tool_use"'),
    ("responses", {"input": "x", "tools": [FLAT]}, "event: response.in_progress", "event: response.output_item.added"),
])
def test_a_call_that_is_held_back_is_a_sign_of_life_too(
    folder, monkeypatch, writes, route, asked, sign, call  # noqa: F811
):  # fmt: skip
    """A call goes out whole; its rounds say nothing before."""
    made = engine(folder)
    made.tokenizer.inner.chat_template = TEMPLATE
    step = made.step
    made.step = lambda: (sleep(0.02), step())[1]
    monkeypatch.setattr(streams, "PING_SECONDS", 0.1)
    writes(CALL)
    with serving(made) as where:
        body = {**asked, "draft": "none", "stream": True}
        lines = httpx.post(f"{where}/v1/{route}", json=body, timeout=60).text.splitlines()
    (at,) = [i for i, line in enumerate(lines) if call in line]
    signs = [i for i, line in enumerate(lines) if sign in line]
    assert sum(i < at for i in signs) > 1, lines


def test_signs_of_life_between_items_disturb_no_client(folder, monkeypatch, writes):  # noqa: F811
    """OpenAI's own client puts a response together from its events, and `response.in_progress` is one that it reads."""
    openai = pytest.importorskip("openai")
    made = engine(folder)
    made.tokenizer.inner.chat_template = TEMPLATE
    step = made.step
    made.step = lambda: (sleep(0.02), step())[1]
    monkeypatch.setattr(streams, "PING_SECONDS", 0.01)
    writes(f"I add.\n{CALL}\n{CALL}")
    with serving(made) as where:
        asked = openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0).responses
        ask = {"model": "tiny", "input": "x", "tools": [FLAT], "extra_body": {"draft": "none"}}
        with asked.stream(**ask, max_output_tokens=200) as events:
            kinds = [event.type for event in events]
            done = events.get_final_response()
    assert [item.type for item in done.output] == ["message", "function_call", "function_call"]
    assert "response.in_progress" in kinds[kinds.index("response.output_item.done") :]
