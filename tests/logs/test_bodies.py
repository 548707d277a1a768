"""Bodies of every API, whole and as streams, and lines as containers, tracers and tables keep them."""

import bz2
import json
import lzma

import pytest

from paceline.logs.bodies import ConversationError, asked, said, seconds_of
from paceline.logs.conversations import read_trace
from paceline.textfiles import opened, records

ASKED = [{"role": "user", "content": "Hello?"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
USED = {"type": "tool_use", "id": "1", "name": "add", "input": {"x": 1}}


def stream(*events, done=True):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n" * done


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


REQUESTS = {
    "chat": {"model": "m", "messages": ASKED, "stop": ["a long stop string of many words"], "stream": True},
    "responses": {"model": "m", "input": "Hello?"},
    "responses, items": {"model": "m", "input": [{"type": "message", "role": "user", "content": "Hello?"}]},
    "anthropic": {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello?"}]}]},
    "ollama": {"model": "m", "messages": ASKED, "options": {"num_ctx": 4096}},
}
RESPONSES = {
    "chat": {"choices": [{"message": {"role": "assistant", "content": "Hi."}}], "usage": {"completion_tokens": 3}},
    "chat, streamed": stream(delta(role="assistant"), delta(content="H"), delta(content="i."),
                             {"choices": [], "usage": {"completion_tokens": 3}}),
    "another choice is left out": stream(delta(content="Hi."), {"choices": [{"index": 1, "delta": {"content": "No."}}]},
                                         {"choices": [], "usage": {"completion_tokens": 3}}),
    "text, streamed": stream({"choices": [{"index": 0, "text": "H"}]}, {"choices": [{"index": 0, "text": "i."}]},
                             {"choices": [], "usage": {"completion_tokens": 3}}, done=False),
    "responses": {"output": [{"type": "message", "role": "assistant",
                              "content": [{"type": "output_text", "text": "Hi."}]}], "usage": {"output_tokens": 3}},
    "responses, streamed": stream(
        {"type": "response.output_text.delta", "delta": "H"}, {"type": "response.completed", "response": {
            "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hi."}]}],
            "usage": {"output_tokens": 3}}}, done=False),
    "anthropic": {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Hi."}],
                  "stop_reason": "end_turn", "usage": {"input_tokens": 9, "output_tokens": 3}},
    "anthropic, streamed": stream(
        {"type": "message_start", "message": {"usage": {"output_tokens": 1}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi."}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}, done=False),
    "ollama": {"message": {"role": "assistant", "content": "Hi."}, "done": True, "eval_count": 3},
    "ollama, a text": {"response": "Hi.", "done": True, "eval_count": 3},
    "ollama, streamed": '{"message": {"role": "assistant", "content": "H"}, "done": false}\n'
                        '{"message": {"content": "i."}, "done": true, "eval_count": 3}\n',
    "tgi": [{"generated_text": "Hi.", "details": {"generated_tokens": 3}}],
    "tgi, streamed": stream({"token": {"text": "Hi"}, "generated_text": None},
                            {"token": {"text": "."}, "generated_text": "Hi.", "details": {"generated_tokens": 3}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_what_was_asked(name):
    messages, tools, is_rendered = asked(REQUESTS[name], ())
    assert ((messages, tools, is_rendered), asked(json.dumps(REQUESTS[name]), ())[0]) == ((ASKED, [], False), ASKED)


@pytest.mark.parametrize("name", RESPONSES)
def test_what_was_said(name):
    assert said(RESPONSES[name], ()) == ({"role": "assistant", "content": "Hi."}, 3)


@pytest.mark.parametrize("key", ["system", "instructions"])
@pytest.mark.parametrize("text", ["Be brief, please, whatever comes.", [{"type": "text", "text": "Be brief."}]])
def test_what_stands_before_the_messages_is_read(key, text):
    messages, _, _ = asked({"messages": ASKED, key: text}, ())
    assert [one["role"] for one in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief")


def test_text_beside_the_messages_is_an_error():
    body = {"messages": ASKED, "context": "a text of many words that the model has read"}
    with pytest.raises(ConversationError, match='the text under "context" would not be read'):
        asked(body, ())
    assert asked(body, ("context",))[0] == ASKED


@pytest.mark.parametrize("response", [
    {"choices": [{"message": {"role": "assistant", "content": "Hi.", "reasoning_content": "I greet."}}]},
    {"role": "assistant",
     "content": [{"type": "thinking", "thinking": "I greet."}, {"type": "text", "text": "Hi."}]},
    stream(delta(reasoning_content="I gr"), delta(reasoning="eet."), delta(content="Hi.")),
    {"output": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "I greet."}]},
                {"type": "message", "content": [{"type": "output_text", "text": "Hi."}]}]},
])
def test_a_thought_is_part_of_the_answer(response):
    assert said(response, ())[0]["content"] == "<think>\nI greet.\n</think>\n\nHi."


@pytest.mark.parametrize("response", [
    {"role": "assistant", "content": [USED]},
    {"output": [{"type": "function_call", "name": "add", "arguments": '{"x": 1}'}]},
    stream(
        delta(tool_calls=[{"index": 0, "function": {"name": "add", "arguments": '{"x"'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    ),
    stream(
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "add"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"x"'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ": 1}"}},
    ),
])
def test_calls_are_answers(response):
    message, _ = said(response, ())
    assert (message["content"], message["tool_calls"]) == ("", [CALL])


def test_streamed_calls_have_the_order_of_their_numbers():
    calls = [{"index": n, "function": {"name": name, "arguments": "{}"}} for n, name in ((1, "second"), (0, "first"))]
    message, _ = said(stream(*(delta(tool_calls=[call]) for call in calls)), ())
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["first", "second"]


def test_times_are_seconds_whatever_their_unit():
    times = 1.7e9, 1700000000, 1.7e12, "2023-11-14T22:13:20+00:00"
    assert {seconds_of(time) for time in times} == {1.7e9}
    assert {seconds_of(time) for time in (0, -5, True, "soon", None, 10**400)} == {None}


def test_anthropics_tools_and_their_results():
    turns = [*ASKED, {"role": "assistant", "content": [USED]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]}]  # fmt: skip
    tools = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    messages, offered, _ = asked({"messages": turns, "tools": tools}, ())
    assert ([one["role"] for one in messages], messages[2]["content"]) == (["user", "assistant", "tool"], "2")
    assert offered[0]["function"] == {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


@pytest.mark.parametrize("body", [stream({"error": "overloaded"}), stream({"choices": []}), {"usage": {}}, 3])
def test_what_holds_no_answer_is_an_error(body):
    with pytest.raises(ConversationError, match="no answer"):
        said(body, ())


# Lines of containers, tracers and tables --------------------------------------------------------------------------

LINE = json.dumps({"request": {"messages": ASKED}, "response": RESPONSES["chat"]})
VLLM = [
    "(APIServer pid=7) DEBUG 11-02 19:10:43 [logger.py:51] Request chatcmpl-1 details: prompt: 'Hello?', "
    "prompt_token_ids: [1, 2], prompt_embeds shape: None.",
    "(APIServer pid=7) INFO 11-02 19:10:44 [logger.py:90] Generated response chatcmpl-1: output: 'Hi.', "
    "output_token_ids: [3, 4], finish_reason: stop",
]
WRAPS = {
    "docker": lambda line: json.dumps({"log": line + "\n", "stream": "stdout", "time": "2026-11-02T19:10:43.1Z"}),
    "kubernetes": lambda line: f"2026-11-02T19:10:43.123456789Z stdout F {line}",
    "journald": lambda line: f"Nov 02 19:10:43 node1 vllm[7]: {line}",
    "journald, JSON": lambda line: json.dumps({"MESSAGE": line, "_HOSTNAME": "node1", "PRIORITY": "6"}),
}
TRACES = {
    "helicone": {"request_body": {"messages": ASKED}, "response_body": RESPONSES["chat"]},
    "langsmith": {"run_type": "llm", "inputs": {"messages": [[{"type": "human", "data": {"content": "Hello?"}}]]},
                  "outputs": {"generations": [[{"message": {"id": ["langchain", "AIMessage"], "type": "constructor",
                                                            "kwargs": {"content": "Hi."}}}]]}},
    "opentelemetry": {"name": "chat m", "attributes": {
        "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "Hello?"}]}],
        "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "Hi."}]}]}},
    "opentelemetry, OTLP": {"attributes": [
        {"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(
            [{"role": "user", "parts": [{"type": "text", "content": "Hello?"}]}])}},
        {"key": "gen_ai.output.messages", "value": {"stringValue": json.dumps(
            [{"role": "assistant", "parts": [{"type": "text", "content": "Hi."}]}])}}]},
}  # fmt: skip


def write(file, *lines):
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def shown(one):
    return [f"{message['role']}: {message['content']}" for message in one.messages]


@pytest.mark.parametrize("name", WRAPS)
def test_lines_of_containers(name, tmp_path):
    """With the banners and tracebacks that stand between them."""
    wrap, noise = WRAPS[name], ("Loading weights...", "  File x, line 3", "INFO:     Started server process [1]")
    (one,) = read_trace(write(tmp_path / "log.jsonl", *map(wrap, (noise[0], LINE, *noise[1:]))))
    assert shown(one) == ["user: Hello?", "assistant: Hi."]
    (exact,) = read_trace(write(tmp_path / "vllm.log", *map(wrap, (noise[0], VLLM[0], noise[2], VLLM[1]))))
    assert exact.tokens == ([1, 2], [3, 4])


@pytest.mark.parametrize("name", TRACES)
def test_traces(name, tmp_path):
    others = {"run_type": "chain", "inputs": {}, "outputs": {}}, {"attributes": {"http.method": "POST"}}
    (one,) = read_trace(write(tmp_path / "log.jsonl", *map(json.dumps, (*others, TRACES[name]))))
    assert shown(one) == ["user: Hello?", "assistant: Hi."]


def test_tables_and_packed_files(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    table = pa.table({"prompt": ["Hello?"], "response": ["Hi."], "messages": pa.nulls(1, pa.string())})
    parquet.write_table(table, tmp_path / "log.parquet")
    csv.write_csv(table, tmp_path / "log.csv")
    raw = (LINE + "\n").encode()
    (tmp_path / "log.jsonl.xz").write_bytes(lzma.compress(raw))
    (tmp_path / "log.jsonl.bz2").write_bytes(bz2.compress(raw))
    with pa.CompressedOutputStream(str(tmp_path / "log.jsonl.zst"), "zstd") as file:
        file.write(raw)
    for file in sorted(tmp_path.iterdir()):
        (one,) = read_trace(file)
        assert shown(one) == ["user: Hello?", "assistant: Hi."], file.name
    (tmp_path / "chats.csv").write_text('messages,id\n"[{""role"": ""user"", ""content"": ""Hello?""}]",7\n')
    with opened(tmp_path / "chats.csv", ConversationError) as file:
        ((where, row),) = records(file, tmp_path / "chats.csv", ConversationError)
    assert (where, row) == (f"{tmp_path / 'chats.csv'}, item 1", {"messages": ASKED, "id": "7"})
    (tmp_path / "log.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConversationError, match="no Parquet file"):
        read_trace(tmp_path / "log.parquet")
