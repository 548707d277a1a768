"""Malformed requests over all routes: none may cost a 500, a traceback or the server. The long form is slow.

PACELINE_FUZZ is another number of requests, PACELINE_FUZZ_SEED another beginning.
"""

import asyncio
import copy
import json
import logging
import os
from collections import Counter
from random import Random
from unittest.mock import ANY

import httpx2 as httpx
import pytest

from tests.serve.live import engine, serving

COUNT = int(os.environ.get("PACELINE_FUZZ", "5000"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "0"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
COMMON = {
    "model": "tiny", "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "n": 2, "seed": 1, "stop": ["x", "y"], "stop_token_ids": [3], "ignore_eos": True, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "stream": True,
    "stream_options": {"include_usage": True}, "draft": "sam", "return_token_ids": True, "user": "me",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "prediction": {"type": "content", "content": "the cat"}, "metadata": {"a": "b"}, "store": False,
}  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "the cat"}]},
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "3"},
]
ASKED = {
    "model": "tiny", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"],
    "stream": True, "metadata": {"user_id": "u"},
    "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""},
    {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]}]}],
    "tools": [{"name": "add", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "tool", "name": "add"}, "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
BODIES = {
    "/v1/chat/completions": {
        **COMMON, "messages": MESSAGES, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2,
        "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": True, "chat_template_kwargs": {"enable_thinking": True},
    },
    "/v1/completions": {**COMMON, "prompt": ["the cat", "a dog"], "echo": True, "logprobs": 2},
    "/v1/responses": {
        "model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "the cat"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "3"}]}],
        "instructions": "be kind", "client_metadata": {"a": "b"},
        "max_output_tokens": 3, "temperature": 0.5,
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}, {"type": "web_search"},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "x"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]}],
        "tool_choice": {"type": "function", "name": "add"}, "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"}, "stream": True, "store": False, "include": [],
    },
    "/v1/messages": ASKED,
    "/v1/messages/count_tokens": ASKED,
    "/tokenize": {"prompt": "the cat", "messages": MESSAGES, "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/api/chat": {
        "model": "tiny", "messages": MESSAGES, "tools": [TOOL], "think": True, "format": SCHEMA, "stream": True,
        "options": {"num_predict": 3, "temperature": 0.5, "stop": ["x"], "num_ctx": 99}, "keep_alive": "5m",
    },
    "/infill": {
        "input_prefix": "def f(", "input_suffix": "return 1", "input_extra": [{"text": "x", "filename": "a.py"}],
        "prompt": "a", "n_predict": 3, "temperature": 0.5, "top_k": 4, "stop": ["x"], "samplers": ["top_k"],
        "response_fields": ["content", "timings/prompt_n"],
    },
}  # fmt: skip
NEEDED = {"messages", "input", "prompt", "tokens", "max_tokens", "n_predict", "input_prefix", "options"}
OTHERS = (
    "/", "/health", "/v1/models", "/metrics", "/stats", "/version", "/openapi.json", "/docs", "/v1/nothing", "/%ff",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "TRACE")
ODD = [
    None, True, False, 0, 1, -1, 2, 3.5, 1e308, -1e308, 1e-300, 2**31, 2**63, -(2**63), 10**400, -100, 100,
    "", "x", "\x00", "\ud800", "é🙂", "none", "auto", "required", "json_object", "text", "{{ 1/0 }}", "<|user|>",
    "a" * 3000, [], [[]], [None], [{}], [1, "a"], ["a", 1], [[1], [2]], [5] * 300, [""] * 20,
    {}, {"": ""}, {"a": {"b": [{}]}}, {"type": "function"}, {"type": "text"}, {"type": "text", "text": 1},
    {"function": "add"}, {"type": "object", "$ref": "#"}, {"enum": []}, {"type": "string", "pattern": "("},
    {"anyOf": []}, {"const": None}, {str(i): i for i in range(20)},
    {"a\nb": 1}, {"a" * 3000: 1}, {"type": "a" * 3000}, {"type": "a\nb"}, "a\nb",
]  # fmt: skip


class Fuzz:
    """Makes requests: mostly a good one of which a few things were spoiled."""

    def __init__(self, seed):
        self.random = Random(seed)

    def request(self):
        """Method, path, body and headers."""
        random = self.random
        headers = {"Content-Type": "application/json"}
        if random.random() < 0.1:
            path = random.choice([*OTHERS, *BODIES])
            return random.choice(METHODS), path, random.choice([b"", b"{}", b"x" * 99]), headers
        path = random.choice([*BODIES, "/v1/chat/completions", "/v1/completions"])
        raw = json.dumps(self.body(path)).encode()
        if random.random() < 0.15:
            raw = self.torn(raw)
        if random.random() < 0.05:
            headers = random.choice([{}, {"Content-Type": "text/plain"}, {**headers, "Authorization": "Bearer \x7f"}])
        return "POST", path, raw, headers

    def body(self, path):
        """A body with up to three things that are odd."""
        body = copy.deepcopy(BODIES[path])
        for name in [name for name in body if name not in NEEDED and self.random.random() < 0.75]:
            del body[name]
        if self.random.random() < 0.5:
            body.pop("stream", None)
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 3])):
            holder, at = self.place(body)
            odd = copy.deepcopy(self.random.choice(ODD))
            change = self.random.random()
            if change < 0.7:
                holder[at] = odd
            elif change < 0.8:
                del holder[at]
            elif isinstance(holder, dict):
                holder[self.random.choice(["odd", "best_of", "chat_template", "strict", *COMMON])] = odd
            else:
                holder.append(odd)
            if not body:
                break
        return body if self.random.random() < 0.98 else self.random.choice(ODD)

    def place(self, body):
        """Something in a body: what holds it, and its key there."""
        while True:
            at = self.random.choice(list(body) if isinstance(body, dict) else list(range(len(body))))
            inner = body[at]
            if not isinstance(inner, (dict, list)) or not inner or self.random.random() < 0.4:
                return body, at
            body = inner

    def torn(self, raw):
        """Bytes that were cut, changed or put twice."""
        at, to = sorted(self.random.randrange(len(raw) + 1) for _ in range(2))
        junk = self.random.choice([b"", b"\xff", b'"', b"{", b"]", b"\\u", b"NaN", b"1e999", b"9" * 5000, b"[" * 500])
        return self.random.choice([raw[:at], raw[:at] + junk + raw[at:], raw[:at] + junk + raw[to:], raw + raw])


async def send(address, count, seed):
    """Statuses of `count` requests, and what is wrong with their answers."""
    fuzz, statuses, wrong = Fuzz(seed), Counter[int](), list[str]()
    left = iter(range(count))
    async with httpx.AsyncClient(base_url=address, timeout=120) as http:

        async def client():
            for _ in left:
                method, path, raw, headers = fuzz.request()
                reply = await http.request(method, path, content=raw, headers=headers)
                statuses[reply.status_code] += 1
                if fault := problem(reply):
                    wrong.append(f"{fault}: {method} {path} {raw[:600]!r} {headers}: {reply.text[:400]}")

        await asyncio.gather(*(client() for _ in range(8)))
    return statuses, wrong


def problem(reply):
    """What no answer may be; nothing if all is well."""
    if reply.status_code >= 500:
        return "a failure"
    if "Traceback" in reply.text or "site-packages" in reply.text:
        return "a traceback"
    if reply.status_code >= 400 and reply.request.method != "HEAD":
        try:
            made = reply.json()
            if reply.url.path.startswith("/api/"):
                made = {"error": {"message": made["error"], "type": "x", "param": None, "code": None}}
            message, kind = made["error"].pop("message"), made["error"].pop("type")
        except (ValueError, KeyError, TypeError):
            return "no error object"
        ours = {"type": "error", "error": {}}, {"error": {"param": ANY, "code": ANY}}
        if made != ours["/v1/messages" not in reply.url.path] and message != "this is no HTTP request":  # nor a path
            return "an error in another API's form"
        return "" if kind and message and "\n" not in message and len(message) < 1000 else "no line"
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        last = (events or [""])[-1]
        ended = last == "[DONE]" or '"type": "response.' in last or '"type": "message_stop"' in last
        if not ended or any(error in event for event in events for error in ("server_error", "api_error")):
            return "a stream that failed"
    return ""


def run(folder, caplog, count):
    made = engine(folder, max_batch=8)
    made.tokenizer.inner.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])  # for /infill
    with caplog.at_level(logging.WARNING), serving(made, most_waiting=256) as address:
        statuses, wrong = asyncio.run(send(address, count, SEED))
        assert httpx.get(f"{address}/health").status_code == 200
        body = {"prompt": "the cat", "max_tokens": 2}
        assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n\n".join(wrong[:10])
    traced = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not traced, traced[:5]
    assert not made.rows
    return statuses


def test_malformed_requests_are_refused_in_words(folder, caplog):
    statuses = run(folder, caplog, 300)
    assert statuses[400] > 100
    assert statuses[200] > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_malformed_requests(folder, caplog, capsys):
    statuses = run(folder, caplog, COUNT)
    with capsys.disabled():
        print(f"\n{dict(sorted(statuses.items()))}")
