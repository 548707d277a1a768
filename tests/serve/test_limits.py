"""What one request may ask for, and what is wrong with requests: each is refused with one line before it costs much."""

import asyncio
import gzip
import json
import re
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from pydantic import ValidationError

from paceline.core.request import overlap
from paceline.errors import PacelineError
from paceline.serve.fields import ChatRequest, DetokenizeRequest, TextRequest, TokenizeRequest
from paceline.serve.guard import parsed
from paceline.serve.said import public
from paceline.serve.settings import LIMITS, Limits, Refused
from paceline.serve.structure import Grammars
from tests.pairs import paired
from tests.serve.live import engine, serving

USER = {"role": "user", "content": "the cat"}
CHAT = {"messages": [USER], "max_tokens": 2}
TEXT = {"prompt": "the cat", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SMALL = {
    "messages": 3, "parts": 3, "prompts": 3, "answers": 3, "stops": 3, "stop_length": 30, "stop_ids": 3,
    "logit_bias": 3, "logprobs": 3, "tools": 3, "schema": 300, "values": 100,
}  # fmt: skip
STRICT = {**TOOL, "function": {"name": "f", "strict": True, "parameters": {"properties": {"x": {"type": "odd"}}}}}
ENUM = {**TOOL, "function": {"name": "f", "parameters": {"enum": ["x"]}}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 400]}}}
THINKING = "{% if enable_thinking %}<|think|>{% endif %}{% generation %}{{ documents }}{% endgeneration %}"


@pytest.fixture(scope="module")
def served(folder):
    made = engine(folder, max_batch=8)
    made.tokenizer.inner.chat_template += THINKING
    return made


@pytest.fixture(scope="module")
def address(served):
    with serving(served) as where:
        yield where


def ask(address, body, path=None):
    path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    headers = {"Content-Type": "application/json"}
    return httpx.post(address + path, content=json.dumps(body).encode(), headers=headers, timeout=60)


# Counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "body"), [
    ("messages", {"messages": [USER] * 4}), ("messages", {"input": [USER] * 4}),
    ("parts", {"input": [{"content": [{"type": "input_text", "text": ""}] * 2}] * 2}),
    ("parts", {"messages": [{"content": [{"type": "text", "text": ""}] * 2}] * 2}),
    ("parts", {"messages": [{"role": "assistant", "tool_calls": [{}] * 4}]}), ("prompts", {"prompt": ["a"] * 4}),
    ("prompts", {"prompt": [[1], [2], [3], [4]]}), ("answers", {"prompt": "a", "n": 4}),
    ("stops", {"prompt": "a", "stop": ["x"] * 4}), ("stop_length", {"prompt": "a", "stop": "x" * 31}),
    ("stop_length", {"prompt": "a", "stop": ["x" * 31]}), ("stop_ids", {"prompt": "a", "stop_token_ids": [1] * 4}),
    ("logit_bias", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(4)}}),
    ("logprobs", {"prompt": "a", "logprobs": 4}),
    ("logprobs", {"messages": [USER], "logprobs": True, "top_logprobs": 4}),
    ("tools", {"messages": [USER], "tools": [TOOL] * 4}),
    ("schema", {"messages": [USER], "tools": [{**TOOL, "x": "y" * 400}]}),
    ("schema", {"prompt": "a", "response_format": SCHEMA}),
    ("schema", {"messages": [USER], "chat_template_kwargs": {"x": ["y"] * 90}}), ("values", {"prompt": [[1] * 200]}),
    ("values", {"messages": [{}] * 30}),
])
def test_each_count_has_a_limit_that_names_its_option(limit, body):
    kind = ChatRequest if "messages" in body else TextRequest
    with pytest.raises(Refused) as caught:
        parsed(kind, json.dumps(body).encode(), Limits(**SMALL))
    says = f"--limit {limit.replace('_', '-')}=N" if limit != "values" else "100 JSON values"
    assert says in str(caught.value)


def test_every_limit_is_described():
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    for name, (default, *_) in LIMITS.items():
        assert f"| `{name}` | {'' if default is None else f'{default:,}'}" in page


def test_punctuation_in_strings_is_no_value():
    limits = Limits(values=100)
    for text in ("a, [b], {c}, " * 1000, 'she said "yes", ' * 1000, "\\" * 999 + "," * 999, "ü,\n" * 999):
        limits.check_raw(json.dumps({"prompt": text}).encode())
    for raw in (b"[" * 1000, b'{"a":' + b"[]," * 1000, b'"",' * 1000, b"0," * 1000, b'"\\"",' + b"1," * 1000):
        with pytest.raises(Refused, match="100 JSON values"):
            limits.check_raw(raw)
    limits.check_raw(b'"' + b"\\a,[" * 300_000)  # a string without an end: no backtracking


@pytest.mark.parametrize("prompt", [[{}] * 9999, ["a"] * 9999 + [1], [[1], ["a"] * 9999], [1] * 9999 + ["a"]])
def test_a_wrong_item_is_found_without_listing_all(prompt):
    """A body must not cost an error for each of its items."""
    with pytest.raises(ValidationError) as caught:
        TextRequest.model_validate({"prompt": prompt})
    assert caught.value.error_count() == 1
    with pytest.raises(ValidationError) as caught:
        DetokenizeRequest.model_validate({"tokens": prompt})
    assert caught.value.error_count() == 1


def test_the_end_of_a_text_that_may_begin_a_stop_string():
    for case in ("abcab abd", "aaa aab", " x", "abc c", "aXa aXaY", "ab abc", "b ab"):
        text, stop = case.split(" ")
        slow = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
        assert overlap(text, stop) == slow


# Over HTTP -----------------------------------------------------------------------------------------------------------

BAD_CHATS = [
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": "add"}}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, 400, "tool_choice"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, 400, "messages.0: a content part must be an object"),
    ({"messages": [{"role": "user", "content": [None]}]}, 400, "messages.0: a content part must be an object"),
    ({"messages": [{"role": "user", "content": [["a"]]}]}, 400, "messages.0: a content part must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, 400, "messages.0"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages.0: content must be"),
    ({"messages": [USER, {"content": "x"}]}, 400, "messages.1: role is missing"),
    ({"chat_template_kwargs": {"chat_template": "{{ 'a'*50000000 }}"}}, 400, "has 'chat_template'"),
    ({"chat_template_kwargs": {"tokenize": False}}, 400, "has 'tokenize'"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, 400, "has 'add_generation_prompt'"),
    ({"chat_template_kwargs": {"continue_final_message": True}}, 400, "has 'continue_final_message'"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, 400, "has 'bos_token'"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "has 'messages'"),
    ({"chat_template_kwargs": {"odd": 1}}, 400, "reads: documents, enable_thinking"),
    ({"chat_template_kwargs": {"documents": ["x"]}}, 400, "refuses these messages"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2}, 400, "min_tokens does not go with"),
    ({"min_tokens": 3}, 400, "min_tokens is 3, and max_tokens 2"),
    ({"logit_bias": {"5": 1e308, "6": 1e308}}, 400, "logit_bias.5"),
    ({"logit_bias": {"999999": 1}}, 400, "logit_bias names token 999999"),
    ({"repetition_penalty": 1e-308}, 400, "repetition_penalty"),
    ({"model": "other"}, 404, "this server has 'tiny'"),
    ({"draft": "magic"}, 400, "requests may choose sam"),
    ({"best_of": 2}, 400, "best_of is not a field that this server supports"),
    ({"temperature": -1}, 400, "temperature is -1"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url is not supported"),
    ({"messages": [{"role": "user", "content": "the cat " * 400_000}]}, 400, "shorten it"),
    ({"response_format": {"type": "json_schema"}}, 400, "schema is missing"),
    ({"model": "\ud800"}, 400, "half of a surrogate pair"),
    ({"n": 100}, 400, "100 answers at once"),
    ({"seed": 2**64}, 400, "seed"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}, 400, "cannot be kept"),
    ({"messages": [{"role": "user", "content": "the cat " * 4000}]}, 400, "shorten it"),
    ({"messages": [USER, {"role": "wizard", "content": "x"}]}, 400, "messages.1: role is 'wizard'; it can be system"),
    ({"messages": [{"role": "a" * 4_000_000, "content": "x"}]}, 400, "role is 'aaa"),
    ({"prediction": {"type": "content", "content": "xy" * 1000}}, 400, "prediction has 2000 tokens"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": "string"}}}]}, 400, "let type be object"),
    ({"tools": [STRICT]}, 400, "cannot be kept to"),
    ({"tools": [ENUM], "tool_choice": "required"}, 400, "cannot be kept to"),
    ({"n": "129"}, 400, "n: Input should be a valid integer"),
    ({"n": 2.0}, 400, "n: Input should be a valid integer"),
    ({"logprobs": True, "top_logprobs": "8192"}, 400, "top_logprobs: Input should be a valid integer"),
    ({"temperature": "1"}, 400, "temperature: Input should be a valid number"),
    ({"logprobs": 1}, 400, "logprobs: Input should be a valid boolean"),
    ({"stream_options": {"include_usage": "yes"}}, 400, "stream_options.include_usage"),
    ({"stop_token_ids": ["5"]}, 400, "stop_token_ids.0"),
]


@pytest.mark.parametrize(("stream", "fields", "status", "says"), paired([False, True], BAD_CHATS))
def test_a_chat_that_is_refused(address, fields, status, says, stream):
    reply = ask(address, {**CHAT, **fields, "stream": stream})
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json"), reply.text
    error = reply.json()["error"]
    assert says in error["message"]
    assert (error["type"], error["code"] == "model_not_found") == ("invalid_request_error", status == 404)


@pytest.mark.parametrize(("path", "raw", "status", "says"), [
    ("/v1/completions", b"", 400, "not JSON"),
    ("/v1/chat/completions", b"{nope", 400, "not JSON"),
    ("/v1/completions", b'{"prompt": "' + b"the cat " * 400_000 + b'"}', 400, "shorten it"),
    ("/v1/completions", b"null", 400, "must be a JSON object"),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400, "NaN is no number"),
    ("/v1/completions", b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", 400, "4,300 digits"),
    ("/v1/completions", b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400, "levels deep"),
    ("/v1/completions", b'{"prompt": "\xff"}', 400, "not UTF-8"),
    ("/v1/completions", b'{"prompt": [99999]}', 400, "outside the model's"),
    ("/v1/completions", b'{"prompt": [-1]}', 400, "outside the model's"),
    ("/v1/completions", b'{"prompt": "a", "logprobs": 8192.0}', 400, "logprobs: Input should be a valid integer"),
    ("/v1/completions", b'{"prompt": "a", "n": true}', 400, "n: Input should be a valid integer"),
    ("/v1/completions", b'{"prompt": "a", "logit_bias": {"5": "1"}}', 400, "logit_bias.5"),
    ("/v1/completions", b'{"prompt": []}', 400, "empty"),
    ("/v1/completions", b'{"prompt": "a", "n": 1, "n": 2}', 400, "the field 'n' is there twice"),
    ("/tokenize", b'{"messages": [{"role": "user", "role": "tool"}]}', 400, "the field 'role' is there twice"),
    ("/v1/completions", b'{"prompt": [true]}', 400, "prompt: give a text"),
    ("/v1/completions", b'{"prompt": [100000000000000000000000000000000]}', 400, ""),
    ("/tokenize", b'{"prompt": "' + b"a " * 600_000 + b'"}', 400, "--limit text=N"),
    ("/tokenize", b'{"messages": [{"role": "user", "content": [1]}]}', 400, "messages.0"),
    ("/tokenize", b'{"prompt": "\\ud800"}', 400, "surrogate"),
    ("/detokenize", b'{"tokens": [' + b"1," * 150_000 + b"1]}", 400, "--limit ids=N"),
    ("/detokenize", b'{"tokens": [1, "x"]}', 400, "tokens.1"),
    ("/detokenize", b'{"tokens": [99999]}', 400, "outside the model's"),
])
def test_a_body_that_is_refused(address, path, raw, status, says):
    reply = httpx.post(address + path, content=raw, headers={"Content-Type": "application/json"}, timeout=60)
    assert reply.status_code == status, reply.text
    assert says in reply.json()["error"]["message"]


def test_only_json_is_read(address):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"Content-Type": kind}
        assert httpx.post(f"{address}/v1/completions", content=b"{}", headers=headers).status_code == 415
    kinds = {"Content-Type": "application/json; charset=utf-8"}
    raw = json.dumps(TEXT).encode()
    assert httpx.post(f"{address}/v1/completions", content=raw, headers=kinds).status_code == 200


def test_bodies_in_pieces_and_packed(address):
    """Clients that do not know a body's length send it in chunks; some pack it."""
    raw, kind = json.dumps({**TEXT, "prompt": "the cat " * 50}).encode(), {"Content-Type": "application/json"}
    url, packed = f"{address}/v1/completions", gzip.compress(raw)
    for body, coding in (
        (iter([raw[:9], raw[9:]]), {}), (packed, {"Content-Encoding": "gzip"}),
        (iter([packed]), {"Content-Encoding": "GZIP"}),
        (raw, {"Content-Encoding": "identity"}),
    ):  # fmt: skip
        assert httpx.post(url, content=body, headers=kind | coding, timeout=60).status_code == 200
    bomb = gzip.compress(b" " * (5 << 20))
    for body, coding, status, says in (
        (raw, "gzip", 400, "is not gzip"), (packed[:-9], "gzip", 400, "one whole gzip"),
        (raw, "br", 415, "encoded as br"),
        (bomb, "gzip", 413, "larger than 4194304 bytes"), (packed + b"x", "gzip", 400, "one whole gzip"),
    ):  # fmt: skip
        reply = httpx.post(url, content=body, headers={**kind, "Content-Encoding": coding}, timeout=60)
        assert (reply.status_code, says in reply.json()["error"]["message"]) == (status, True)
    reply = httpx.post(url, content=iter([b" " * (1 << 20)] * 5), headers=kind, timeout=60)
    assert reply.status_code == 413


@pytest.mark.parametrize(("path", "says"), [
    ("/v1/nothing", "POST /v1/nothing: Not Found"),
    ("/v1/embeddings", "POST /v1/embeddings: this server writes text and makes no embeddings"),
])
def test_what_is_not_here_is_named(address, path, says):
    reply = httpx.post(address + path, json={"input": "x"})
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (404, True)


def test_null_is_a_field_that_is_not_there(address):
    names = {*ChatRequest.model_fields, "audio", "modalities"} - {"messages", "max_tokens"}
    assert ask(address, {**CHAT, **dict.fromkeys(names)}).status_code == 200
    names = {*TextRequest.model_fields, "best_of", "suffix"} - {"prompt", "max_tokens"}
    assert ask(address, {**TEXT, **dict.fromkeys(names)}).status_code == 200
    body = {**dict.fromkeys(TokenizeRequest.model_fields), "messages": [USER]}
    assert ask(address, body, "/tokenize").status_code == 200


def test_a_negative_seed_is_a_seed(address):
    def texts(seed):
        body = {**TEXT, "max_tokens": 8, "temperature": 1, "n": 2, "seed": seed}
        return [choice["text"] for choice in ask(address, body).json()["choices"]]

    assert texts(-(2**63)) == texts(-(2**63)) != texts(-5)
    assert texts(-5) != texts(5)
    assert texts(-5) == texts(2**64 - 5)  # the same 64 bits
    assert len(texts(2**64 - 1)) == 2  # whose second answer has the next seed, 0


def test_variables_that_the_template_reads_may_be_set(address, served):
    ids = [
        ask(address, {**CHAT, "return_token_ids": True, "chat_template_kwargs": {"enable_thinking": on}}).json()
        for on in (True, False)
    ]
    assert len(ids[0]["prompt_token_ids"]) > len(ids[1]["prompt_token_ids"])


def test_errors_show_no_path_of_the_disk(folder):
    assert public("no /srv/models/demo/a.bin; see http://x.org/a/b or '/home/me/x', model:/srv/models/m has") == (
        "no a.bin; see http://x.org/a/b or 'x', model:m has"
    )
    made = engine(folder)
    template, made.tokenizer.inner.chat_template = made.tokenizer.inner.chat_template, None
    with serving(made) as address:
        for stream in (False, True):
            reply = ask(address, {**CHAT, "stream": stream})
            assert (reply.status_code, str(folder.parent) in reply.text) == (400, False)
            assert "tiny has no chat template" in reply.text
        made.tokenizer.inner.chat_template = template
        made.target.verify = _fails
        for stream in (False, True):
            assert "/srv" not in (text := ask(address, {**TEXT, "stream": stream}).text)
            assert "model.safetensors" in text


def on_the_loop():
    """Whether this thread runs an event loop."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def _fails(*_):
    raise FileNotFoundError(2, "No such file or directory", "/srv/models/secret/model.safetensors")


def test_a_schema_is_compiled_once(folder, monkeypatch):
    made = engine(folder, max_batch=8)
    compiled = []
    compile_ = Grammars._compile

    def counted(self, grammar):
        compiled.append(on_the_loop())
        return compile_(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", counted)
    with serving(made) as address:
        body = {**CHAT, "n": 4, "temperature": 1}
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x", "yy"]}}}
        for _ in range(2):
            reply = ask(address, {**body, "max_tokens": 12})
            assert reply.status_code == 200
            texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
            assert set(texts) <= {'"x"', '"yy"'}, texts
    assert compiled == [False]


def test_what_may_take_long_is_not_done_on_the_event_loop(address, served):
    """Parsing, rendering, tokenizing and compiling of more than a few kilobytes."""
    on_loop = []
    tokenizer = served.tokenizer
    kept = {name: getattr(tokenizer, name) for name in ("encode", "encode_chat", "refuse_long")}

    def watched(name):
        def call(*args, **options):
            if on_the_loop():
                on_loop.append(name)
            return kept[name](*args, **options)

        return call

    large = {"role": "user", "content": "the cat " * 3000}
    tool = {**CHAT, "tools": [TOOL], "tool_choice": "required"}
    try:
        for name in kept:
            setattr(tokenizer, name, watched(name))
        for body in ({"messages": [large]}, {"prompt": large["content"]}, {**tool, "max_tokens": 1}):
            ask(address, body)
        ask(address, {"messages": [large]}, "/tokenize")
        ask(address, {"prompt": large["content"]}, "/tokenize")
        assert on_loop == []
        ask(address, TEXT)
        assert "encode" in on_loop  # a small one is done at once
    finally:
        for name in kept:
            delattr(tokenizer, name)


def test_a_refusal_of_the_engine_is_a_paceline_error(served):
    from paceline.core.sampling import SamplingParams

    before = served._next_id, list(served.waiting)
    with pytest.raises(PacelineError, match="logit_bias names token"):
        served.check([5], SamplingParams(logit_bias={10**6: 1.0}))
    served.check([5], SamplingParams())
    assert (served._next_id, list(served.waiting)) == before


def test_the_description_has_every_body(address):
    described = httpx.get(f"{address}/openapi.json").json()
    names = set(described["components"]["schemas"])
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert body.rpartition("/")[2] in names
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))) <= names
