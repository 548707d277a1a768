"""Every field of a request: it changes the answer as it says, or it is refused by name. None is ignored."""

import json
import re
from dataclasses import replace
from importlib import import_module

import httpx2 as httpx
import pytest
from openai.types import completion_create_params as of_texts
from openai.types.chat import completion_create_params as of_chats

from paceline.serve import fields
from paceline.serve.fields import ChatRequest, TextRequest
from paceline.serve.items import ItemsRequest
from paceline.serve.structure import Grammars
from tests import models
from tests.serve.live import engine, serving, spelled

LABELS = {"user": "somebody", "metadata": {"a": "b"}, "safety_identifier": "somebody", "prompt_cache_key": "somebody",
          "service_tier": "auto", "modalities": ["text"], "cache_prompt": True,
          "cache_control": {"type": "ephemeral"}}  # fmt: skip
"""Fields that name things for the caller, or ask for what there is anyway, and change nothing."""
MESSAGES = [{"role": "user", "content": "the cat and the dog"}]
CHAT = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
TEXT = {"prompt": "the cat and", "max_tokens": 12, "temperature": 0}
TAKES = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": TAKES}}
ENUM = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"]}}}
OBJECT = {"type": "json_object"}


@pytest.fixture(scope="module")
def http(folder):
    with serving(engine(folder, max_batch=8)) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def reply(http, body):
    return http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)


def answer(http, body):
    """What a request gets, but for what differs from one request to the next."""
    made = reply(http, body)
    assert made.status_code == 200, made.text
    return {name: value for name, value in made.json().items() if name not in ("id", "created", "metrics", "usage")}


def events(http, body):
    lines = [line[6:] for line in reply(http, body).text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# What each field does. `CHANGES`: beside this the answer is another one. Other fields have a test of their own below.

CHANGES = {
    "max_tokens": {"max_tokens": 5},
    "max_completion_tokens": {"max_completion_tokens": 12, "max_tokens": None, "n": 2},
    "temperature": {"temperature": 1.5, "seed": 1},
    "n": {"n": 2},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "logit_bias": {"logit_bias": {"40": 100}},
    "return_token_ids": {"return_token_ids": True},
    "response_format": {"response_format": ENUM},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 1},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [ADD]},
    "tool_choice": {"tools": [ADD], "tool_choice": "required"},
    "prompt": {"prompt": "a dog"},
    "add_special_tokens": {"add_special_tokens": False, "return_token_ids": True},
    "messages": {"messages": [{"role": "user", "content": "hello"}]},
    "add_generation_prompt": {"add_generation_prompt": False, "return_token_ids": True},
    "continue_final_message": {"messages": [*MESSAGES, {"role": "assistant", "content": "a"}],
                               "continue_final_message": True},
}
HAS_A_TEST = {
    "test_fields.test_the_model_may_be_named": "model",
    "test_fields.test_where_tokens_are_drawn_from": "top_p top_k min_p",
    "test_fields.test_a_seed": "seed",
    "test_fields.test_tokens_that_end_an_answer": "stop stop_token_ids ignore_eos min_tokens",
    "test_fields.test_streams": "stream stream_options",
    "test_fields.test_what_would_be_ignored_is_refused": "store",
    "test_serve.test_a_prediction_is_copied_and_counted": "prediction",
    "test_serve.test_a_request_chooses_its_drafter": "draft",
    "test_serve.test_nobody_sees_what_another_asked": "cache_salt",
    "test_tools.test_what_a_template_does_not_read_is_refused": "chat_template_kwargs reasoning_effort enable_thinking",
    "test_tools.test_whole_answers_and_streams_say_the_same": "parallel_tool_calls",
    "test_serve.test_json_closes_within_its_tokens": "on_length",
    "test_agents.test_thinking_is_asked_for_in_many_ways": "reasoning thinking verbosity",
    "test_infill.test_a_suffix_makes_the_prompt_of_the_middle": "suffix",
}


@pytest.mark.parametrize("kind", [ChatRequest, TextRequest])
def test_every_field_is_in_a_table(kind):
    assert set(kind.model_fields) <= {*CHANGES, *" ".join(HAS_A_TEST.values()).split(), *LABELS}
    for file, name in (test.split(".") for test in HAS_A_TEST):
        assert callable(getattr(import_module(f"tests.serve.{file}"), name))


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_the_answer(http, name):
    for base, kind in ((CHAT, ChatRequest), (TEXT, TextRequest)):
        if name in kind.model_fields:
            more = {"logprobs": True} if name == "logprobs" and kind is ChatRequest else CHANGES[name]
            assert answer(http, {**base, **more}) != answer(http, base)
            given = {**base, **more, **({"max_tokens": 12} if name != "max_tokens" else {})}
            if name not in base and name != "max_completion_tokens":  # null is what it is without the field
                assert answer(http, {**base, name: None} if nullable(kind, name) else base) == answer(http, base), given


def nullable(kind, name):
    return type(None) in getattr(kind.model_fields[name].annotation, "__args__", ())


@pytest.mark.parametrize("name", LABELS)
def test_labels_change_nothing(http, name):
    assert answer(http, {**CHAT, name: LABELS[name]}) == answer(http, CHAT)


@pytest.mark.parametrize("kind", [of_chats, of_texts])
def test_every_parameter_of_openai_is_a_field_or_refused_by_name(http, kind):
    base, own = (CHAT, ChatRequest) if kind is of_chats else (TEXT, TextRequest)
    names = set(kind.CompletionCreateParamsBase.__annotations__) - set(own.model_fields)
    assert {"best_of"} <= names or {"audio"} <= names
    for name in sorted(names):
        made = reply(http, {**base, name: "x"})
        assert (made.status_code, made.json()["error"]["param"]) == (400, name)
        assert f"{name} is not a field" in made.json()["error"]["message"]


# What would be ignored ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "more", "says"), [
    (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options is for streams"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options is for streams"),
    (CHAT, {"response_format": OBJECT, "tools": [ADD], "tool_choice": "required"}, "response_format cannot be"),
    (
        CHAT,
        {"response_format": ENUM, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        "response_format cannot be",
    ),
    (CHAT, {"ignore_eos": True, "response_format": ENUM}, "ignore_eos"),
    (TEXT, {"ignore_eos": True, "response_format": OBJECT}, "ignore_eos"),
    (CHAT, {"ignore_eos": True, "tools": [ADD], "tool_choice": "required"}, "ignore_eos"),
    (CHAT, {"response_format": {**ENUM, "type": "text"}}, "set its type to json_schema"),
    (CHAT, {"max_completion_tokens": 13}, "max_tokens is 12 and max_completion_tokens 13"),
    (CHAT, {"store": True}, "store is true"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"continue_final_message": True}, "needs an assistant's last message"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    *[(CHAT, {"logit_bias": {key: 1}}, f"{key!r} is no token id") for key in ("1_0", " 1", "1.0", "\uff11", "-1", "")],
])
def test_what_would_be_ignored_is_refused(http, base, more, says):
    made = reply(http, {**base, **more})
    assert made.status_code == 400
    assert says in made.json()["error"]["message"]


@pytest.mark.parametrize("more", [
    {"top_logprobs": None, "stream_options": None, "response_format": None, "store": False},
    {"max_completion_tokens": 12}, {"response_format": {"type": "text"}, "ignore_eos": True},
    {"response_format": {"type": "text"}, "tools": [ADD], "tool_choice": "required"},
    {"response_format": OBJECT, "tools": [ADD], "tool_choice": "none"},
    {"parallel_tool_calls": None, "tools": None, "tool_choice": None},
])
def test_what_contradicts_nothing_is_taken(http, more):
    assert reply(http, {**CHAT, **more}).status_code == 200


@pytest.mark.parametrize(("path", "body", "says"), [
    ("/tokenize", {"prompt": "x", "model": "other"}, "this server has 'tiny'"),
    ("/detokenize", {"tokens": [5], "model": "other"}, "this server has 'tiny'"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "either prompt or messages"),
    ("/tokenize", {}, "either prompt or messages"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": False}, "add_special_tokens is for a prompt"),
])
def test_tokens_of_what_is_not_there(http, path, body, says):
    made = http.post(path, json=body)
    assert made.status_code in (400, 404)
    assert says in made.json()["error"]["message"]


def test_fields_of_tokenize(http):
    own = {"model", "prompt", "messages", "add_special_tokens"}
    assert set(fields.TokenizeRequest.model_fields) == own | set(fields.Conversation.model_fields)
    assert set(fields.DetokenizeRequest.model_fields) == {"model", "tokens"}

    def tokens(**body):
        return list(http.post("/tokenize", json={"model": "tiny", **body}).json()["tokens"])

    assert tokens(prompt="the") == tokens(prompt="the", add_special_tokens=True)
    assert tokens(prompt="the") == [models.BOS, *tokens(prompt="the", add_special_tokens=False)]
    asked = reply(http, {**CHAT, "return_token_ids": True}).json()
    assert tokens(messages=MESSAGES) == asked["prompt_token_ids"]
    for more in ({"tools": [ADD]}, {"tools": [ADD], "tool_choice": "none"}, {"add_generation_prompt": False}):
        asked = reply(http, {**CHAT, **more, "return_token_ids": True}).json()
        assert tokens(messages=MESSAGES, **more) == asked["prompt_token_ids"]


# Fields with more to them ------------------------------------------------------------------------------------------


def test_the_model_may_be_named(http):
    assert answer(http, {**CHAT, "model": "tiny"}) == answer(http, CHAT)


@pytest.mark.parametrize("more", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_where_tokens_are_drawn_from(http, more):
    """Where one token is left to draw, the answer is the greedy one."""
    drawn = {**CHAT, "temperature": 1.5, "seed": 1}
    assert answer(http, drawn) != answer(http, CHAT)
    assert answer(http, {**drawn, **more}) == answer(http, CHAT)


def test_a_seed(http):
    drawn = {**CHAT, "temperature": 1.5}
    assert answer(http, {**drawn, "seed": 1}) == answer(http, {**drawn, "seed": 1})
    assert answer(http, {**drawn, "seed": 1}) != answer(http, {**drawn, "seed": 2})


@pytest.mark.parametrize("kind", [ChatRequest, TextRequest, ItemsRequest])
def test_minus_one_is_no_seed_and_other_seeds_are_kept(kind):
    asked = {"input": "a"} if kind is ItemsRequest else CHAT if kind is ChatRequest else TEXT
    seeds = {given: kind.model_validate({**asked, "seed": given}).seed for given in (-1, None, 0, -2, 2**64 - 1)}
    assert seeds == {-1: None, None: None, 0: 0, -2: -2, 2**64 - 1: 2**64 - 1}


def test_tokens_that_end_an_answer(http):
    ids = answer(http, {**TEXT, "return_token_ids": True})["choices"][0]["token_ids"]
    ended = answer(http, {**TEXT, "stop_token_ids": [ids[3]], "return_token_ids": True})["choices"][0]
    assert ended["token_ids"] == ids[: ids.index(ids[3]) + 1]
    text = answer(http, TEXT)["choices"][0]["text"]
    for stop in (text[2:5], [text[2:5]]):
        assert answer(http, {**TEXT, "stop": stop})["choices"][0]["text"] == text[: text.index(text[2:5])]
    ends = {**TEXT, "logit_bias": {str(models.EOS): 100}, "return_token_ids": True}
    assert len(answer(http, ends)["choices"][0]["token_ids"]) == 1
    assert len(answer(http, {**ends, "ignore_eos": True})["choices"][0]["token_ids"]) == 12
    assert len(answer(http, {**ends, "min_tokens": 5})["choices"][0]["token_ids"]) == 6


def test_streams(http):
    options = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    assert set(fields.StreamOptions.model_fields) == options
    for base in (CHAT, TEXT):
        plain = events(http, {**base, "stream": True})
        assert not any(event.get("usage") for event in plain)
        counted = events(http, {**base, "stream": True, "stream_options": {"include_usage": True}})
        assert [bool(event["usage"]) for event in counted] == [False] * (len(counted) - 1) + [True]
        all_along = events(http, {**base, "stream": True, "stream_options": {"continuous_usage_stats": True}})
        used = [event["usage"]["completion_tokens"] for event in all_along if event.get("usage")]
        assert (used, used[-1]) == (sorted(used), 12)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_every_prompt(http, stream):
    asked = {**TEXT, "return_token_ids": True, "stream": stream}
    if stream:
        for base in (asked, {**asked, "n": 2}, {**CHAT, "return_token_ids": True, "stream": True}):
            made, whole = events(http, base), answer(http, {**base, "stream": False})
            assert made[0]["prompt_token_ids"] == whole["prompt_token_ids"]
            for choice in whole["choices"]:
                own = [one for event in made for one in event["choices"] if one["index"] == choice["index"]]
                assert [token for one in own for token in one.get("token_ids", [])] == choice["token_ids"]
        return
    prompts = ["the cat", "there was a little dog", "and"]
    choices = answer(http, {**asked, "prompt": prompts, "n": 2})["choices"]
    alone = [answer(http, {**asked, "prompt": prompt})["prompt_token_ids"] for prompt in prompts]
    assert [choice["prompt_token_ids"] for choice in choices] == [ids for ids in alone for _ in range(2)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the cat and the dog sat there", [20, 30, 40], "cat \u00e9\U0001f600 dog"])
def test_offsets_are_places_in_the_text(http, stream, echo, prompt):
    """Each token's text is at its place: also of the first, of special ones, and of characters of several tokens."""
    body = {**TEXT, "prompt": prompt, "logprobs": 0, "echo": echo, "stream": stream, "return_token_ids": True}
    if stream:
        made = [choice for event in events(http, body) for choice in event["choices"]]
        text = "".join(choice["text"] for choice in made)
        listed = [choice["logprobs"] for choice in made if choice["logprobs"]]
        columns = {name: [value for one in listed for value in one[name]] for name in ("tokens", "text_offset")}
    else:
        choice = answer(http, body)["choices"][0]
        text, columns = choice["text"], choice["logprobs"]
    tokens, offsets = columns["tokens"], columns["text_offset"]
    assert (offsets[0], offsets) == (0, sorted(offsets))
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        if not token.startswith("bytes:") and end > begin:
            assert text[begin:end] == token
    whole = [token for token in tokens if not token.startswith("bytes:") and token not in models.SPECIAL]
    assert sum(map(len, whole)) <= len(text)


@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"logprobs": 1, "echo": True}, {"n": 2, "return_token_ids": True}]
)
def test_a_stream_of_several_prompts(http, more):
    ask = {**TEXT, "prompt": ["the cat", "there was a little dog", "and"], **more}
    whole = reply(http, ask).json()
    streamed = events(http, {**ask, "stream": True, "stream_options": {"include_usage": True}})
    parts = [choice for event in streamed for choice in event["choices"]]
    for choice in whole["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if "echo" in more and "logprobs" in more:
            offsets = [at for part in own for at in (part["logprobs"] or {"text_offset": []})["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]
    used = {name: streamed[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert used == {name: whole["usage"][name] for name in used}
    prompts = [event["prompt_token_ids"] for event in streamed if "prompt_token_ids" in event]
    assert prompts == [c["prompt_token_ids"] for c in whole["choices"] if "prompt_token_ids" in c]


def test_an_answer_goes_on_with_the_last_message(http):
    """Its tokens are those of a text that was cut off."""
    whole = answer(http, {**CHAT, "return_token_ids": True})
    begun = {"role": "assistant", "content": "the d"}
    asked = {**CHAT, "messages": [*MESSAGES, begun], "continue_final_message": True, "return_token_ids": True}
    made = answer(http, asked)["prompt_token_ids"]
    text = http.post("/detokenize", json={"tokens": made}).json()["prompt"]
    start = http.post("/detokenize", json={"tokens": whole["prompt_token_ids"]}).json()["prompt"]
    assert (text, reply(http, {**asked, "add_generation_prompt": True}).status_code) == (start + "the d", 400)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_may_be_called_now(http, mode):
    sub = {**ADD, "function": {**ADD["function"], "name": "sub"}}
    one = [{"type": "function", "function": {"name": "sub"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": one}}
    asked = {**CHAT, "max_tokens": 60, "tools": [ADD, sub]}
    plain = answer(http, {**asked, "tools": [sub], "tool_choice": mode})
    made = [json.dumps(one) for one in (plain, answer(http, {**asked, "tool_choice": allowed}))]
    assert len({re.sub('"id": "[^"]*"', "", one) for one in made}) == 1
    one[0]["function"]["name"] = "mul"
    assert "tools has: add, sub" in reply(http, {**asked, "tool_choice": allowed}).json()["error"]["message"]


def test_tools_beside_a_response_format(http):
    """With tool_choice auto the answer is a call or fits the schema."""
    form = {**TAKES, "properties": {"y": {"$ref": "#/$defs/Y"}}, "required": ["y"], "$defs": {"Y": {"const": 3}}}
    ask = {"type": "json_schema", "json_schema": {"schema": form}}
    both = {**CHAT, "max_tokens": 80, "response_format": ask, "tools": [ADD], "temperature": 1.0}
    seen = set()
    for seed in range(12):
        (choice,) = answer(http, {**both, "seed": seed})["choices"]
        if choice["finish_reason"] == "length":
            continue  # an untrained model may fill its budget with blanks
        if choice["finish_reason"] == "tool_calls":
            assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["x"] in (1, 2)
        else:
            assert json.loads(choice["message"]["content"]) == {"y": 3}
        seen.add(choice["finish_reason"])
    assert seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("x", "strict", "is_call"), [(1, True, True), (3, True, False), (3, False, True)])
def test_a_strict_tool_takes_only_what_fits(folder, stream, x, strict, is_call):
    """Calls that the model writes by itself; a grammar has it write them."""
    made = engine(folder)
    text = json.dumps({"name": "add", "arguments": {"x": x}})
    grammars, add = Grammars(made.tokenizer, models.VOCAB_SIZE, [models.EOS]), made.add
    made.add = lambda prompt, params: add(prompt, replace(params, grammar=spelled(grammars, text)))
    tool = {**ADD, "function": {**ADD["function"], "strict": strict}}
    with serving(made) as address, httpx.Client(base_url=address, timeout=60) as http:
        body = {**CHAT, "max_tokens": 200, "tools": [tool], "stream": stream}
        if stream:
            deltas = [choice["delta"] for event in events(http, body) for choice in event["choices"]]
            calls = any("tool_calls" in delta for delta in deltas)
        else:
            calls = "tool_calls" in answer(http, body)["choices"][0]["message"]
    assert calls == is_call
