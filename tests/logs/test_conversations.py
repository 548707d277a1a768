"""Conversations in every format that is read, and one line for each that cannot be."""

import gzip
import json

import pytest

from paceline.logs.bodies import ConversationError
from paceline.logs.conversations import SPEC_BENCH, Reading, read_trace
from paceline.logs.formats import FORMATS, Format, conversation

PAIR = {"prompt": "Hello?", "response": "Hi."}
ASKED = [{"role": "user", "content": "Hello?"}]
SAID = [{"role": "assistant", "content": "Hi."}]


def write(folder, *records, name="log.jsonl"):
    file = folder / name
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", "utf-8")
    return file


READ = {
    '{"prompt": "a"}': (["user a"], [], "user a"),
    '{"prompt": "a", "completion": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "text": "b"}': (
        ["system s", "user a", "assistant b"], [2], "system s, user a",
    ),
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "text": "a b"}': (
        ["user a", "assistant b"], [1], "user a, assistant b",
    ),
    '{"turns": ["a", "b"], "question_id": 81}': (["user a", "user b"], [], "user a"),
    '{"turns": [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}]}': (
        ["user a", "assistant b"], [1], "user a, assistant b",
    ),
    '{"instruction": "a", "input": "", "output": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"instruction": "a", "input": null, "output": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"instruction": "a", "input": "c", "output": "b"}': (["user a\\n\\nc", "assistant b"], [1], "user a\\n\\nc"),
    '{"instruction": "a", "context": "c", "response": "b"}': (["user a\\n\\nc", "assistant b"], [1], "user a\\n\\nc"),
    '{"question": "a", "answer": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"choices": [{"turns": ["a", "b"]}]}': (["assistant a", "assistant b"], [0, 1], "assistant a, assistant b"),
}  # fmt: skip


@pytest.mark.parametrize("line", READ)
def test_every_form(line):
    """Messages, which of them are answers, and the prompt up to where the model is first to answer."""
    messages, answers, first = READ[line]
    one = conversation(line.encode(), (), "log, line 3")
    said = [f"{message['role']} {message['content']}".replace("\n", "\\n") for message in one.messages]
    assert (said, list(one.answers), one.where) == (messages, answers, "log, line 3")
    assert ", ".join(said[: len(one.first_prompt)]) == first


def test_texts_and_token_ids():
    book = conversation({"title": "T", "text": "a"})
    assert (book.text, book.parts, book.texts()) == ("a", {"title": "T"}, ["a"])
    assert conversation({"tokens": [3]}).tokens == (None, [3])
    # Ids are what the model read; text beside them is not tokenised again.
    assert conversation(PAIR | {"prompt_tokens": [1], "tokens": [3]}).tokens == ([1], [3])


@pytest.mark.parametrize("about", [{"prompt": "Hello?"}, {"messages": ASKED}], ids=["prompt", "messages"])
def test_what_generate_writes_is_a_recording(tmp_path, about):
    """A line of `paceline generate --json`, whose prompt_tokens is a number."""
    line = about | {"index": 0, "text": "Hi.", "prompt_tokens": 9, "finish_reason": "length", "weights": "bfloat16"}
    (one,) = read_trace(write(tmp_path, line | {"error": LONG, "logprobs": [{"token": LONG}]}))
    assert (list(one.messages), list(one.answers), one.tokens, one.is_cut) == (ASKED + SAID, [1], None, True)


def test_every_message_of_the_assistant_is_an_answer_unless_there_is_a_response(tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, *(ASKED + SAID) * 2, *ASKED]
    alone, answered = read_trace(write(tmp_path, {"messages": talk}, {"messages": talk, "response": "Hi again."}))
    assert (list(alone.answers), len(alone.messages)) == ([2, 4], 5)
    assert (list(answered.answers), len(answered.messages)) == ([6], 7)


def test_gzip_blank_lines_and_a_byte_order_mark(tmp_path):
    content = b"\xef\xbb\xbf" + json.dumps(PAIR).encode() + b"\n\n" + json.dumps(PAIR).encode() + b"\n"
    (tmp_path / "log.gz").write_bytes(gzip.compress(content))
    assert [e.where[-6:] for e in read_trace(tmp_path / "log.gz")] == ["line 1", "line 3"]


def answer(id, turns, category="qa"):
    return {"question_id": id, "category": category, "choices": [{"index": 0, "turns": turns}]}


def test_spec_bench_answers_join_their_questions(tmp_path):
    whole = [name for name, count in SPEC_BENCH.items() for _ in range(count)]
    asked = [{"question_id": id, "category": name, "turns": ["A?", "B?"]} for id, name in enumerate(whole)]
    trace = write(tmp_path, answer(7, ["a", "b"], "writing"))
    (exchange,) = read_trace(trace, questions=write(tmp_path, *asked, name="questions"))
    assert ([m["content"] for m in exchange.messages], list(exchange.answers)) == (["A?", "a", "B?", "b"], [1, 3])
    assert exchange.category == "mt-bench"
    (exchange,) = read_trace(trace, questions=write(tmp_path, *asked[:-1], name="mine"))
    assert exchange.category == "writing"  # one's own questions are not grouped as in the paper


def test_token_ids(tmp_path):
    logged = {"time": 1.5, "prompt_tokens": [5, 6], "tokens": [7], "finish_reason": "stop", "temperature": 0.0}
    (exchange,) = read_trace(write(tmp_path, logged | {"category": "greetings"}))
    assert (exchange.tokens, exchange.category) == (([5, 6], [7]), "greetings")


LONG = "the letter that the question is about"


@pytest.mark.parametrize(("record", "key"), [
    (PAIR | {"input": LONG}, "input"), (PAIR | {"context": [LONG]}, "context"),
    ({"instruction": "Hello?", "output": "Hi.", "system": LONG}, "system"),
    ({"messages": ASKED + SAID, "prompt": LONG}, "prompt"), ({"messages": ASKED + SAID, "text": LONG}, "text"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_text_that_would_not_be_read_is_an_error_unless_it_is_to_be_ignored(tmp_path, record, key):
    file = write(tmp_path, record)
    complains(file, "line 1", f'the text under "{key}" would not be read', '"metadata"', f"--ignore {key}")
    (exchange,) = read_trace(file, ignore=[key])
    assert list(exchange.messages) == ASKED + SAID


def test_what_is_about_an_answer_does_no_harm(tmp_path):
    about = {"id": LONG, "source": LONG, "metadata": {"note": LONG}, "url": "https://" + "a" * 99, "time": 1.5}
    labels = {"lang": "en", "quality": "needs another look", "flags": ["a", {"b": "c"}], "hash": "0" * 64, "n": [1, 2]}
    (exchange,) = read_trace(write(tmp_path, PAIR | about | labels))
    assert list(exchange.messages) == ASKED + SAID


def test_ignore_takes_alpacas_input_away(tmp_path):
    file = write(tmp_path, {"instruction": "Hello?", "input": LONG, "output": "Hi."})
    (exchange,) = read_trace(file, ignore=["input"])
    assert list(exchange.messages) == ASKED + SAID


def test_limit_and_categories(tmp_path):
    file = write(tmp_path, *(PAIR | {"category": "ab"[i % 2]} for i in range(10)))
    assert len(read_trace(file, limit=3)) == 3
    assert [e.where[-6:] for e in read_trace(file, limit=2, categories=["b"])] == ["line 2", "line 4"]


def complains(file, *words, **options):
    with pytest.raises(ConversationError) as raised:
        read_trace(file, **options)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(("line", "words"), [
    ('{"prompt": "a", ', ("not JSON", "column")),
    ('"a"', ("JSON object", "str")),
    ({"prompt": "a"}, ('no "response"',)),
    ({"prompt": "a", "response": None}, ('"response" must be a text', "null")),
    ({"text": "a"}, ("neither a prompt nor messages", "text")),
    ({"a": 1, "b": 2}, ("unknown record with the keys a, b", "OpenAI batch files", "ShareGPT")),
    ({"messages": ASKED}, ("no response",)),
    ({"messages": []}, ('"messages" must be',)),
    ({"messages": [{"role": "user"}]}, ('"messages" must be',)),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ('"messages" must be',)),
    ({"messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [1]}]}, ("tool_calls is a list",)),
    ({"prompt_tokens": [1], "tokens": "a"}, ('"tokens" must be a list of token ids',)),
    ({"prompt_tokens": [-1], "tokens": [1]}, ('"prompt_tokens" must be a list of token ids',)),
    ({"prompt_tokens": [1], "tokens": [10**30]}, ('"tokens" must be a list of token ids',)),
    ({"instruction": "a", "input": 3, "output": "b"}, ('"input" must be a text, not a number',)),
    (PAIR | {"category": 3}, ('"category" must be a text',)),
    ({"custom_id": "a", "response": {"status_code": 429, "body": {}}}, ("the request failed",)),
    ({"custom_id": "a", "response": {"body": {"choices": [{"text": "Hi."}]}}}, ("no prompt has the custom_id a",)),
    ({"messages": ASKED, "choices": []}, ("no answer in the response",)),
    ({"request": {"model": "m"}, "response": "Hi."}, ("no prompt in the request",)),
    ({"event": "request.finished", "obj": {"text": "a" * 1024 + "..." + "b" * 1024}, "out": {"text": "Hi."}},
     ("--log-requests-level 3",)),
])
def test_a_line_that_cannot_be_used(tmp_path, line, words):
    complains(write(tmp_path, line), "line 1", *words)
    reading = Reading()
    assert len(read_trace(write(tmp_path, PAIR, line, PAIR), reading=reading)) == 2
    (note,) = reading.notes()
    assert note.startswith("1 of 3 lines skipped: first at ")
    assert all(word in note for word in ("line 2", *words))
    assert [*reading.notes(redact=True)] == ["1 of 3 lines skipped"]


def test_more_than_half_is_too_much(tmp_path, caplog):
    complains(write(tmp_path, PAIR, "{", "["), "line 2", "not JSON", "(2 of 3 lines cannot be read)")
    complains(write(tmp_path, "{", "["), "line 1", "not JSON", "(2 of 2 lines cannot be read)")
    assert len(read_trace(write(tmp_path, PAIR, "{"))) == 1
    assert "1 of 2 lines skipped" in caplog.text


# Logs of others --------------------------------------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CHAT = {"model": "m", "messages": ASKED, "tools": [{"type": "function", "function": {"name": "add"}}]}
SAYS = {"choices": [{"index": 0, "message": SAID[0] | {"refusal": None}}], "usage": {"completion_tokens": 3}}
VLLM = [
    "(APIServer pid=7) INFO 11-02 19:10:43 [logger.py:60] Received request chatcmpl-1: params: SamplingParams(n=1).",
    "(APIServer pid=7) DEBUG 11-02 19:10:43 [logger.py:51] Request chatcmpl-1 details: prompt: 'Hello?', "
    "prompt_token_ids: [1, 2], prompt_embeds shape: None.",
    "INFO:     127.0.0.1:1234 - \"POST /v1/chat/completions HTTP/1.1\" 200 OK",
    "(APIServer pid=7) INFO 11-02 19:10:44 [logger.py:90] Generated response chatcmpl-1 (streaming delta): output: "
    "'Hi', output_token_ids: [3], finish_reason: None",
    "(APIServer pid=7) INFO 11-02 19:10:44 [logger.py:90] Generated response chatcmpl-1 (streaming complete): output: "
    "'Hi.', output_token_ids: None, finish_reason: stop",
]
LOGS = {
    "OpenAI batch": [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        {"id": "x", "custom_id": "a", "response": {"status_code": 200, "body": SAYS}, "error": None},
    ],
    "vLLM": VLLM,
    "vLLM 0.10": [VLLM[1].replace("Request chatcmpl-1 details", "Received request chatcmpl-1"), VLLM[-1]],
    "SGLang": [
        {"event": "request.received", "rid": "1", "obj": {"text": "Hello?"}},
        {"event": "request.finished", "rid": "1", "obj": {"text": "Hello?", "input_ids": None},
         "out": {"text": "Hi.", "meta_info": {"completion_tokens": 3}}},
    ],
    "LiteLLM": [{"call_type": "acompletion", "messages": ASKED, "response": SAYS, "completion_tokens": 3,
                 "trace_id": "t", "model_parameters": {"stop": "some words of no prompt"}}],
    "Langfuse": [
        {"id": "1", "traceId": "t", "type": "SPAN", "input": "Hello?", "output": "Hi."},
        {"id": "2", "traceId": "t", "type": "GENERATION", "input": json.dumps(ASKED), "output": json.dumps(SAID[0]),
         "usageDetails": {"input": 2, "output": 3}},
    ],
    "ShareGPT": [{"id": "1", "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}]}],
    "bodies": [{"request": CHAT, "response": SAYS}],
    "bodies in one": [CHAT | SAYS],
    "a text completion": [{"prompt": "Hello?", "choices": [{"text": "Hi."}], "usage": {"completion_tokens": 3}}],
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_logs_of_others(tmp_path, name):
    reading = Reading()
    (one,) = read_trace(write(tmp_path, *LOGS[name]), reading=reading)
    assert [*one.messages] == [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
    assert (list(one.answers), reading.skipped, reading.missing) == ([1], 0, 0)
    assert one.usage == (None if name in ("vLLM", "vLLM 0.10", "ShareGPT") else 3)
    assert one.is_rendered == (name in ("vLLM", "vLLM 0.10", "SGLang", "a text completion"))
    has_tools = name in ("OpenAI batch", "bodies", "bodies in one")
    assert [tool["function"]["name"] for tool in one.tools] == (["add"] if has_tools else [])


@pytest.mark.parametrize("first", [0, 1])
def test_a_batchs_two_files_in_any_order(tmp_path, first):
    asked = [{"custom_id": id, "body": CHAT} for id in "abc"]
    said = [{"custom_id": id, "response": {"status_code": 200, "body": SAYS}} for id in "cb"]
    files = [write(tmp_path, *asked, name="in"), write(tmp_path, *said, name="out")]
    read = read_trace(*(files if first == 0 else files[::-1]))
    assert sorted(one.record["custom_id"] for one in read) == ["b", "c"]
    assert read_trace(files[1], questions=files[0])[0].messages == read[0].messages
    other = write(tmp_path, {"custom_id": "b", "body": {"prompt": "Another"}}, name="other")
    reading = Reading()
    read_trace(files[0], other, files[1], reading=reading)
    assert "another prompt has the custom_id b too" in reading.first


def test_token_ids_of_a_server(tmp_path):
    """Ids are what the model read and wrote, so they are preferred to text."""
    texts = {"obj": {"input_ids": [1], "text": "a"}, "out": {"output_ids": [2], "text": "b"}}
    sglang = {"event": "request.finished", **texts}
    assert read_trace(write(tmp_path, sglang))[0].tokens == ([1], [2])


def test_one_json_list(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([PAIR, {"a": 1}, PAIR], indent=1))
    reading = Reading()
    assert len(read_trace(tmp_path / "list.json", reading=reading)) == 2
    assert "list.json, item 2: unknown record" in reading.first
    (tmp_path / "list.json").write_text("[1, ")
    complains(tmp_path / "list.json", "list.json: not JSON")


def test_content_parts(tmp_path):
    picture = {"type": "image_url", "image_url": {"url": "data:" + "x " * 99}}
    parts = [{"type": "text", "text": "Hel"}, picture, {"type": "text", "text": "lo?"}]
    reading = Reading()
    asked = CHAT | {"messages": [{"role": "developer", "content": parts}]}
    (one,) = read_trace(write(tmp_path, asked | SAYS), reading=reading)
    assert [(m["role"], m["content"]) for m in one.messages] == [("system", "Hello?"), ("assistant", "Hi.")]
    assert reading.missing == 1
    assert "1 parts of messages are no text" in " ".join(reading.notes())


AGENT = [
    *ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"}, *SAID,
]


def test_tool_calls_are_answers(tmp_path):
    (one,) = read_trace(write(tmp_path, {"messages": AGENT, "tools": CHAT["tools"]}))
    assert [m["role"] for m in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert (list(one.answers), one.messages[1]["tool_calls"]) == ([1, 3], [CALL])
    assert one.texts()[1:3] == ['{"name": "add", "arguments": {"x": 1}}', "Result: 2"]
    called = {"choices": [{"message": AGENT[1]}]}
    (one,) = read_trace(write(tmp_path, CHAT | called))
    assert one.messages[-1]["tool_calls"] == [CALL]


def test_a_format_is_one_entry(tmp_path, monkeypatch):
    mine = Format("mine", lambda r: "q" in r, lambda r, ignore: conversation({"prompt": r["q"], "response": r["a"]}))
    monkeypatch.setitem(conversation.__globals__, "FORMATS", [mine, *FORMATS])
    (one,) = read_trace(write(tmp_path, {"q": "Hello?", "a": "Hi.", "category": "c"}))
    assert ([*one.messages], one.category) == (ASKED + SAID, "c")


def test_files_that_cannot_be_used(tmp_path):
    complains(tmp_path / "none.jsonl", "none.jsonl", "No such file")
    complains(write(tmp_path, "", name="empty"), "holds no answers", '{"prompt"')
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(PAIR).encode() * 99)[:40])
    complains(tmp_path / "cut.gz", "cut off or damaged")
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    complains(tmp_path / "latin", "line 1", "not UTF-8")
    complains(write(tmp_path, PAIR | {"category": "a"}), "no category 'b'", "a", categories=["b"])
    complains(write(tmp_path, PAIR), "no category 'b'", "name none", categories=["b"])


def test_spec_bench_answers_without_their_questions(tmp_path):
    trace = write(tmp_path, *(answer(id, ["a"]) for id in (1, 2, 3)))
    complains(trace, "line 1", "no prompt has the question_id 1")
    some = write(tmp_path, {"question_id": 2, "turns": ["A?"]}, name="some")
    complains(trace, "line 1", "no prompt has the question_id 1", "2 of 3 lines", questions=some)
    short = write(tmp_path, *({"question_id": id, "turns": ["A?"]} for id in (1, 2, 3)), name="short")
    complains(write(tmp_path, answer(1, ["a", "b"])), "line 1", "2 answers", "1 turns", questions=short)
    complains(write(tmp_path, answer(1, [3])), "must be a list of texts", questions=short)
    complains(write(tmp_path, {"question_id": 1, "choices": []}), "without a response", questions=short)


@pytest.mark.parametrize("line", [
    {"messages": ASKED, "response": "Hi.", "tools": 5}, {"event": "request.finished"},
    {"event": "request.finished", "obj": [], "out": None},
    {"event": "request.finished", "obj": {"text": "a"}, "out": {"text": "b", "meta_info": None}},
    r"INFO 01-01 Request 1: prompt: '\xzz', ",
])
def test_a_line_of_another_shape_is_read_or_skipped(tmp_path, line):
    reading = Reading()
    assert len(read_trace(write(tmp_path, PAIR, line, PAIR), reading=reading)) == 3 - reading.skipped
    assert (reading.lines, reading.answered + reading.skipped) == (3, 3)
