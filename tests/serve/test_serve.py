"""The server, by OpenAI's own client and by hand: what it answers, refuses and counts."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import perf_counter, sleep
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import pytest
from jsonschema import validate

from paceline.cli import main
from paceline.core.request import RowStats
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter, DraftTree
from paceline.engine.engine import Engine
from paceline.errors import RowError
from paceline.net.servers import Drafting, Request, Server
from paceline.serve.fields import Tool
from paceline.serve.metrics import Metrics
from paceline.serve.responses import speculation
from paceline.serve.said import shown_drafts
from paceline.serve.structure import Grammars
from paceline.serve.tools import schema
from tests import models
from tests.fakes import TableTarget
from tests.serve.live import engine, serving

openai = pytest.importorskip("openai")
MESSAGES = [{"role": "user", "content": "the cat and the dog"}]
SHAPES = {
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
    "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "pattern": {"type": "string", "pattern": "^[ab]{3}$"},
    "number": {"type": "number", "minimum": 0, "maximum": 9},
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def served(folder):
    return engine(folder, max_batch=8)


@pytest.fixture(scope="module")
def address(served, log):
    with serving(served, log) as where:
        yield where


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def alone(folder):
    """What the engine answers by itself."""
    made = engine(folder)

    def answer(prompt, **params):
        return made.generate([prompt], SamplingParams(**{"temperature": 0.0, **params}))[0]

    return answer


# What clients do -----------------------------------------------------------------------------------------------------


def test_a_chat_is_the_engines_answer(client, alone):
    done = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=12)
    expected = alone(MESSAGES, max_tokens=12)
    assert (done.choices[0].message.content, done.choices[0].message.role) == (expected.text, "assistant")
    assert (done.usage.completion_tokens, done.usage.prompt_tokens) == (expected.new_tokens, expected.prompt_tokens)
    assert done.choices[0].finish_reason in ("stop", "length")
    told = done.metrics["speculative_decoding"]
    assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] < told["num_rounds"]  # no draft with the prompt
    assert told["num_accepted_draft_tokens"] + told["num_rounds"] == done.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole(client, alone):
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "stream": True}
    chunks = list(client.chat.completions.create(**ask, stream_options={"include_usage": True}))
    expected = alone(MESSAGES, max_tokens=12)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert ([c.choices[0].finish_reason for c in chunks if c.choices][-1], chunks[-1].choices) == ("length", [])
    assert (chunks[-1].usage.completion_tokens, len({c.id for c in chunks})) == (expected.new_tokens, 1)


def test_text_completions_with_several_prompts_and_answers(client, alone):
    done = client.completions.create(model="tiny", prompt=["the cat", "there was"], max_tokens=6, temperature=0)
    wanted = [alone(p, max_tokens=6) for p in ("the cat", "there was")]
    assert [c.text for c in done.choices] == [one.text for one in wanted]
    assert done.usage.prompt_tokens == sum(one.prompt_tokens for one in wanted)
    assert done.usage.total_tokens == done.usage.prompt_tokens + sum(one.new_tokens for one in wanted)
    ask = {"model": "tiny", "prompt": "the cat", "max_tokens": 6, "temperature": 1.0, "seed": 5}
    texts = [c.text for c in client.completions.create(**ask, n=3).choices]
    assert texts == [alone("the cat", max_tokens=6, temperature=1.0, seed=5 + i).text for i in range(3)]
    assert client.completions.create(**ask).choices[0].text == texts[0]


def test_log_probabilities(client, served, alone):
    done = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    expected = alone(MESSAGES, max_tokens=4, logprobs=2).logprobs
    entries = done.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in expected])
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    echoed = client.completions.create(model="tiny", prompt="the cat and", max_tokens=0, echo=True, logprobs=1)
    columns = echoed.choices[0].logprobs
    assert columns.token_logprobs[0] is None
    assert all(p < 0 for p in columns.token_logprobs[1:])
    assert "".join(columns.tokens) == echoed.choices[0].text == "the cat and"
    # The likelihood of a text that the model writes by itself is what it said while writing it.
    wrote = alone("the cat and", max_tokens=3, logprobs=0)
    prompt = [*served.tokenizer.encode("the cat and"), *wrote.tokens]
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    values = [one.logprob for one in wrote.logprobs]
    assert again.choices[0].logprobs.token_logprobs[-3:] == pytest.approx(values, abs=1e-4)


def keeps_to(made, ids, schema):
    """Whether every token of an answer, cut short or not, is one that the schema allows there."""
    target = made.target
    grammar = Grammars(made.tokenizer, target.vocab_size, target.eos_token_ids).json_schema(schema)
    return all(bool(grammar.allowed(ids[:i], target.vocab_size)[token]) for i, token in enumerate(ids))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_fit_their_schema(client, served, shape, temperature):
    ask = {"type": "json_schema", "json_schema": {"name": shape, "schema": SHAPES[shape], "strict": True}}
    done = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=temperature, seed=1, max_tokens=60, response_format=ask,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    (choice,) = done.choices
    assert keeps_to(served, choice.token_ids, SHAPES[shape])
    if choice.finish_reason == "stop":  # an untrained model may fill its budget with blanks
        validate(json.loads(choice.message.content), SHAPES[shape])


@pytest.mark.parametrize("mark", ["<|user|>", "</s>"])
@pytest.mark.parametrize("kind", ["schema", "required", "strict"])
def test_json_may_hold_the_name_of_a_mark(client, kind, mark):
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    value = {f"a{mark}b": mark}
    schema = {"type": "object", "properties": {name: {"const": value[name]} for name in value}, "required": [*value]}
    schema["additionalProperties"] = False
    if kind == "schema":
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        (choice,) = client.chat.completions.create(**ask, response_format=form).choices
        assert (choice.finish_reason, json.loads(choice.message.content)) == ("stop", value)
        return
    function = {"name": "add", "parameters": schema, "strict": kind == "strict"}
    tools = [{"type": "function", "function": function}]
    (choice,) = client.chat.completions.create(**ask, tools=tools, tool_choice="required").choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", value)


@pytest.mark.parametrize("kind", ["schema", "object", "tool"])
def test_json_closes_within_its_tokens(client, kind):
    """The answer says so; one that cannot be that short is refused with the number of tokens it takes."""
    schema = SHAPES["nested"]
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "seed": 4}
    if kind == "tool":
        ask["tools"] = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
        ask["tool_choice"] = "required"
    else:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        ask["response_format"] = form if kind == "schema" else {"type": "json_object"}
    close = {"on_length": "close"}
    with pytest.raises(openai.BadRequestError, match="1 tokens for the answer, which takes at least") as refused:
        client.chat.completions.create(**ask, max_tokens=1, extra_body=close)
    least = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    for most in (least, least + 10):
        done = client.chat.completions.create(**ask, max_tokens=most, extra_body=close)
        (choice,) = done.choices
        text = choice.message.content or json.dumps({"name": "add", "arguments": json.loads(
            choice.message.tool_calls[0].function.arguments)})  # fmt: skip
        value = json.loads(text)
        validate(value["arguments"] if kind == "tool" else value, schema if kind != "object" else {"type": "object"})
        assert done.usage.completion_tokens <= most
        assert (choice.finish_reason, choice.closed) == ("length", True) or most > least
    chunks = list(client.chat.completions.create(**ask, max_tokens=least, extra_body=close, stream=True))
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].closed) == ("length", True)
    with pytest.raises(openai.BadRequestError, match="on_length close is for answers that must be JSON"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=close)


def test_a_tool_must_be_called(client, served):
    takes = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "add", "parameters": takes}}]
    ask = {"model": "tiny", "messages": MESSAGES, "tools": tools, "temperature": 0, "max_tokens": 80}
    call = schema([Tool.model_validate(tools[0])])
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        (done,) = client.chat.completions.create(
            **ask, tool_choice=choice, extra_body={"return_token_ids": True}
        ).choices
        assert keeps_to(served, done.token_ids, call)
        if done.finish_reason == "tool_calls":
            assert json.loads(done.message.tool_calls[0].function.arguments)["x"] in (1, 2)
    with pytest.raises(openai.BadRequestError, match="names the function 'sub'"):
        client.chat.completions.create(**ask, tool_choice={"type": "function", "function": {"name": "sub"}})


def test_a_prediction_is_copied_and_counted(client, alone):
    text = alone(MESSAGES, max_tokens=24).text
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    done = client.chat.completions.create(**ask, prediction={"type": "content", "content": text})
    assert done.choices[0].message.content == text
    details = done.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert done.metrics["speculative_decoding"]["num_spec_steps"] < 24


def test_answers_and_counters_tell_the_same_drafts(folder):
    """As `bench server` and `watch` read them."""
    with serving(engine(folder)) as address:
        server = Server.find(address)
        asks = [(draft, stream) for draft in ("sam", "suffix", "none") for stream in (True, False)]
        bodies = [server.body(Request("", MESSAGES), 20, draft=draft, stream=stream) for draft, stream in asks]
        for body in bodies[1::2]:
            del body["stream_options"]
        told, counted = Drafting.of_answers(server.send(bodies)), server.drafting()
    assert {*told.by_drafter} == {"sam", "suffix"}
    for name in ("drafts", "drafted", "accepted", "by_drafter", "by_position"):
        assert getattr(told, name) == getattr(counted, name), name


def test_a_request_chooses_its_drafter(client):
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    drafted = {
        name: client.chat.completions.create(**ask, extra_body={"draft": name}).metrics["speculative_decoding"]
        for name in ("none", "sam")
    }
    assert drafted["none"]["num_draft_tokens"] == 0 < drafted["sam"]["num_draft_tokens"]


def test_drafters_are_chosen_and_shown_without_their_folders(folder):
    spec = f"model:{folder},stop=fixed,draft=2"
    with serving(engine(folder, drafts=("none", spec))) as address:
        assert httpx.get(f"{address}/stats").json()["drafts"] == ["none", "model:tiny,stop=fixed,draft=2"]
        for name in (spec, "model:tiny,stop=fixed,draft=2"):
            ask = {"prompt": "the cat", "max_tokens": 9, "temperature": 0, "draft": name}
            reply = httpx.post(f"{address}/v1/completions", json=ask).json()
            assert reply["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        refused = httpx.post(f"{address}/v1/completions", json={**ask, "draft": "other"}).json()["error"]["message"]
        assert "requests may choose none, model:tiny,stop=fixed,draft=2" in refused
    assert [*shown_drafts(["auto:sam|rest:~/a/b;x=/c/d", "model:../m/", "model:/n/m/"])] == [
        "auto:sam|rest:b;x=d", "model:m/", "model:m/#2",
    ]  # fmt: skip


def test_penalties_and_the_least_length(client, alone):
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    done = client.chat.completions.create(**ask, frequency_penalty=2.0, presence_penalty=2.0)
    assert (
        done.choices[0].message.content
        == alone(MESSAGES, max_tokens=20, frequency_penalty=2.0, presence_penalty=2.0).text
    )
    assert done.choices[0].message.content != alone(MESSAGES, max_tokens=20).text
    longer = client.chat.completions.create(**ask, extra_body={"min_tokens": 20, "return_token_ids": True})
    assert len(longer.choices[0].token_ids) == 20


# What is refused -----------------------------------------------------------------------------------------------------


def test_what_is_no_route_gets_an_error_object(address):
    replies = [httpx.get(f"{address}/v1/completions"), httpx.get(f"{address}/v1/nothing")]
    assert [reply.status_code for reply in replies] == [405, 404]
    assert all(reply.json()["error"]["message"] for reply in replies)


def test_pages_that_may_ask(folder):
    """A browser asks first whether it may; a wrong key's answer can be read too."""
    with serving(engine(folder), origins=("https://chat.example",), api_keys=("right",)) as address:
        ask = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        url = f"{address}/v1/chat/completions"
        allowed = httpx.options(url, headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        wrong = httpx.post(url, json={}, headers={"Origin": "https://chat.example"})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (401, "https://chat.example")
        assert "access-control-allow-origin" not in httpx.options(url, headers={**ask, "Origin": "https://x.y"}).headers


def test_the_pages_need_nothing_from_elsewhere(address):
    for path in ("/", "/docs"):
        page = httpx.get(address + path)
        assert page.headers["content-type"].startswith("text/html")
        assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page.text)


def test_the_model_by_its_name(client):
    assert client.models.retrieve("tiny").id == "tiny" == client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("some/other")


@pytest.mark.parametrize("words", [600, 4000])  # 4000: refused by its beginning
def test_a_prompt_that_is_too_long(client, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="the cat " * words)
    assert caught.value.code == "context_length_exceeded"
    assert "prompt is too long" in str(caught.value)  # by which LangChain and LiteLLM know it


def test_keys_and_sizes_and_waiting(folder):
    with serving(engine(folder, max_batch=1), most_waiting=1, api_keys=("right",), max_body=4000) as address:
        ask = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True}
        url, key = f"{address}/v1/chat/completions", {"Authorization": "Bearer right"}
        assert httpx.post(url, json=ask).status_code == 401
        assert httpx.post(url, json=ask, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert httpx.post(url, json={"messages": [{"content": "x" * 9000}]}, headers=key).status_code == 413
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda _: httpx.post(url, json=ask, headers=key, timeout=120), range(12)))
        codes = {reply.status_code for reply in replies}
        assert codes == {200, 429}
        assert all(reply.headers["retry-after"] for reply in replies if reply.status_code == 429)


def test_the_log_is_its_owners_and_goes_on_in_a_new_file_when_it_was_renamed(folder, tmp_path):
    log, before = tmp_path / "log.jsonl", os.umask(0)
    try:
        with serving(engine(folder), log) as address:
            for name in ("first", "second", "third"):
                for _ in range(2):
                    httpx.post(f"{address}/v1/completions", json={"prompt": "the cat", "max_tokens": 2})
                assert (log.stat().st_mode & 0o777, len(log.read_text().splitlines())) == (0o600, 2)
                log.rename(tmp_path / name)
    finally:
        os.umask(before)


@pytest.mark.parametrize("share", [False, True])
def test_nobody_sees_what_another_asked(folder, share):
    """What is reused says what another has asked: of prompts of one key, or all, and of one salt."""
    with serving(engine(folder), api_keys=("one", "two"), share_prefixes=share) as address:

        def reused(key, **more):
            ask = {"prompt": "the cat and the dog " * 5, "max_tokens": 2, **more}
            reply = httpx.post(f"{address}/v1/completions", json=ask, headers={"Authorization": f"Bearer {key}"})
            return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert reused("one") == 0
        most = reused("one")
        assert most > 16
        assert [reused("two"), reused("two")] == [most * share, most]
        assert [reused("one", cache_salt="s"), reused("one", cache_salt="s")] == [0, most]
        assert [reused("two", cache_salt="s"), reused("two", cache_salt="t")] == [most * share, 0]


def test_a_key_does_not_wait_for_all_of_another(folder):
    made, go = engine(folder, max_batch=2, max_rows_per_client=1), Event()
    step = made.step
    made.step = lambda: (go.wait(30), step())[1]  # nothing is answered before all have asked
    with serving(made, api_keys=("one", "two")) as address:
        url, ask = f"{address}/v1/completions", {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True}

        def wait_for(count):
            key, counts = {"Authorization": "Bearer one"}, ("running", "waiting")
            while sum(httpx.get(f"{address}/stats", headers=key).json()[what] for what in counts) < count:
                sleep(0.01)

        def done(key):
            assert httpx.post(url, json=ask, headers={"Authorization": f"Bearer {key}"}, timeout=120).status_code == 200
            return perf_counter()

        with ThreadPoolExecutor(9) as pool:
            first = [pool.submit(done, "one") for _ in range(8)]
            wait_for(8)
            other = pool.submit(done, "two")
            wait_for(9)
            go.set()
            ended = other.result()
            assert sum(one.result() > ended for one in first) >= 5


# One engine, many clients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_an_answer_where_it_is(folder, stream):
    made = engine(folder, max_batch=2)
    with serving(made, deadline_s=0.2) as address:
        ask = {"prompt": "the cat", "max_tokens": 1000, "ignore_eos": True, "min_tokens": 900, "stream": stream}
        step = made.step
        made.step = lambda: (sleep(0.02), step())[1]
        reply = httpx.post(f"{address}/v1/completions", json=ask, timeout=60)
    if stream:
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        reason = reply.json()["choices"][0]["finish_reason"]
    assert reason == "abort"


def test_a_client_that_leaves_frees_its_slot(folder):
    made = engine(folder, max_batch=2)
    step = made.step
    made.step = lambda: (sleep(0.05), step())[1]  # by itself an answer ends after half a minute
    with serving(made) as address:
        ask = {"messages": MESSAGES, "max_tokens": 900, "min_tokens": 900, "draft": "none", "stream": True}
        for _ in range(3):
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=ask, timeout=60) as reply:
                next(reply.iter_lines())
        ends = perf_counter() + 15
        while (made.rows or made.waiting) and perf_counter() < ends:
            sleep(0.05)
        assert not made.rows
        assert not made.waiting


def test_a_request_that_fails_fails_alone(folder, alone):
    made = engine(folder, max_batch=4)
    propose = made.drafter.propose

    def failing(asks):
        for row, _ in asks:
            if row.params.seed == 13 and row.num_new >= 3:
                raise RowError(row.id) from RuntimeError("no draft")
        return propose(asks)

    made.drafter.propose = failing
    with serving(made) as address, ThreadPoolExecutor(3) as pool:
        ask = {"prompt": "the cat", "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
        asks = [{**ask, "seed": 5}, {**ask, "seed": 13}, {**ask, "seed": 13, "stream": True}]
        well, ill, cut = pool.map(lambda body: httpx.post(f"{address}/v1/completions", json=body, timeout=60), asks)
    expected = alone("the cat", max_tokens=40, temperature=1.0, seed=5, ignore_eos=True).text
    assert well.json()["choices"][0]["text"] == expected
    assert (ill.status_code, ill.json()["error"]["type"]) == (500, "server_error")
    events = [line[6:] for line in cut.text.splitlines() if line]
    assert "no draft" in json.loads(events[-3])["error"]["message"]
    assert (json.loads(events[-2])["choices"][0]["finish_reason"], events[-1]) == ("error", "[DONE]")
    assert not made.rows


def test_an_answer_without_a_seed_can_be_had_again_by_the_log(tmp_path):
    log = tmp_path / "log.jsonl"
    with serving(engine(models.make_repetitive(tmp_path / "tiny"), max_batch=2), log) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)

        def answer(**more):
            made = client.completions.create(model="tiny", prompt="the cat and the", max_tokens=24, **more)
            return made.choices[0].text

        first = answer(temperature=1.3)
        seed = json.loads(log.read_text())["seed"]
        assert answer(temperature=1.3, seed=seed) == first
        answer(temperature=0)
        assert json.loads(log.read_text().splitlines()[-1])["seed"] is None


@pytest.mark.parametrize("template", [True, False], ids=["chat", "no template"])
def test_the_log_can_be_replayed_and_tuned_with(tmp_path, capsys, template):
    """As it is, by the commands that it is for, and with what the server's own drafts had accepted."""
    folder = models.make_repetitive(tmp_path / "tiny", max_position_embeddings=512)
    if not template:
        bare = models.tokenizer()
        bare.chat_template = None
        bare.save_pretrained(folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    log, table = tmp_path / "log.jsonl", tmp_path / "table.json"
    with serving(engine(folder, max_batch=2), log) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        greedy = {"model": "tiny", "temperature": 0, "max_tokens": 24}
        client.completions.create(prompt="the cat and the", **greedy)
        client.completions.create(prompt=["the little dog", "hello"], n=2, **greedy)
        list(client.completions.create(prompt="there was a", stream=True, **greedy))
        if template:
            client.chat.completions.create(messages=MESSAGES, **greedy)
            list(client.chat.completions.create(messages=MESSAGES, stream=True, **greedy))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) == (8 if template else 6)
    capsys.readouterr()
    assert main(["replay", str(log), "--tokenizer", str(folder), "-d", "sam", "-d", "none", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    sam, none = facts["results"]
    assert facts["answers"] == len(records)
    assert none["rounds"] == none["new_tokens"] == sum(len(record["tokens"]) for record in records)
    rounds = sum(record["rounds"] for record in records)  # one more for each prompt, which drafts nothing
    assert rounds - len(records) <= sam["rounds"] <= rounds < none["rounds"]
    tuned = ("--batch", "1", "--seconds", "0.1", "-d", "sam", "--dtype", "float32", "--json")
    assert main(["tune", str(folder), "--log", str(log), "-o", str(table), *tuned]) == 0
    assert json.loads(table.read_text())["paceline"] == "tune"


def test_a_log_of_another_model_is_no_traffic_of_this_one(tmp_path, folder, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_tokens": [5, 6], "tokens": [7, 320]}\n')
    assert main(["tune", str(folder), "--log", str(log), "-o", str(tmp_path / "table.json")]) == 2
    assert f"error: {log}: token 320 is none of the model's 320" in capsys.readouterr().err
    assert not (tmp_path / "table.json").exists()


def test_accepted_tokens_are_counted_as_the_engine_counts_them():
    """Also where an answer ends inside a draft."""

    class Counting(Drafter):
        def draft(self, row, most):
            return DraftTree.chain(row.last_token, [(row.last_token + n) % 8 for n in range(1, 4)])

    target = TableTarget(8, order=1, logits=lambda tokens: 9.0 * np.eye(8)[(tokens[-1] + 1) % 8])
    made = Engine(target, Counting())
    rows = [made.add([1], SamplingParams(max_tokens=20, stop_token_ids=(end,))) for end in (4, 5, 6, 7)]
    jobs = {row.id: SimpleNamespace(arrived=0.0) for row in rows}
    metrics = Metrics(SimpleNamespace(running=0, waiting=0, jobs=jobs))
    while made.has_work:
        metrics.round(made.step())
    counted = [sum(row.stats.accepted_tokens for row in rows), sum(row.stats.draft_tokens for row in rows)]
    assert [metrics.now()["accepted"], metrics._sum(metrics.drafted)] == counted
    places = metrics.by_place.collect()[0].samples
    assert sum(place.value for place in places if place.name.endswith("_total")) == counted[0]


def test_the_time_of_a_round_is_shared_by_its_tokens(monkeypatch):
    clock = iter((1.0, 7.0))
    monkeypatch.setattr("paceline.serve.metrics.perf_counter", lambda: next(clock))
    metrics = Metrics(SimpleNamespace(running=0, waiting=0, jobs={3: SimpleNamespace(arrived=0.5)}))
    for tokens in ([5], [6, 7, 8]):
        metrics.round([SimpleNamespace(row=SimpleNamespace(id=3), tokens=tokens, nodes=0)])
    for histogram, seconds in ((metrics.first, 0.5), (metrics.between, 2.0)):
        sums = [one.value for one in histogram.collect()[0].samples if one.name.endswith("_sum")]
        assert sums == [seconds]


class Ahead(Drafter):
    """Drafts what the target says next, four tokens in every second round."""

    name = "ahead"

    def __init__(self, text):
        self.text = text

    def draft(self, row, most):
        at = row.num_new
        return self.chain_after(row, np.array(self.text[at : at + min(4, most) * (at % 3 > 0)], np.int64))


@pytest.mark.parametrize("ends", ["max_tokens", "end token", "stop string"])
def test_acceptance_counts_add_up_wherever_an_answer_ends(ends, alone, folder):
    """A step is a round with a draft, as vLLM counts; of a draft only what the answer has of it is accepted."""
    text = alone("the cat", max_tokens=24, ignore_eos=True)
    made = Engine(folder, Ahead(text.tokens), dtype="float32", device="cpu", threads=1, budget=False)
    stop = {"end token": {"stop_token_ids": text.tokens[15:16]}, "stop string": {"stop": [text.text[20:26]]}}
    row = made.add("the cat", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **stop.get(ends, {})))
    made.finish([row])
    told, stats = speculation(row.stats), row.stats
    assert (row.finish_reason == "length") == (ends == "max_tokens")
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] == stats.draft_rounds < stats.rounds
    assert sum(place * n for place, n in enumerate(told["acceptance_histogram"])) == told["num_accepted_draft_tokens"]
    inside = bool(row.runs[-1][0])  # it ended inside its draft
    assert told["num_accepted_draft_tokens"] + told["num_rounds"] - inside == row.num_new
    assert told["by_drafter"] == {
        "ahead": {"drafted": told["num_draft_tokens"], "accepted": told["num_accepted_draft_tokens"]}
    }
    assert told["mean_acceptance_length"] == 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]


def test_an_answer_without_drafts_has_no_steps():
    stats = RowStats()
    for _ in range(3):
        stats.record(0, 0, 0)
    told = speculation(stats)
    assert (told["acceptance_histogram"], told["num_spec_steps"], told["num_spec_tokens"]) == ([0], 0, 0)
    assert (told["mean_acceptance_length"], told["num_rounds"], told["by_drafter"]) == (0.0, 3, {})


def test_facts_and_the_page(address, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert httpx.get(f"{address}/health").status_code == 200
    assert httpx.get(f"{address}/openapi.json").status_code == 200
    tokens = httpx.post(f"{address}/tokenize", json={"prompt": "the cat"}).json()["tokens"]
    assert httpx.post(f"{address}/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("the cat")
    assert "<title>Paceline</title>" in httpx.get(address).text
    assert httpx.get(f"{address}/stats").json()["model"] == "tiny"
    metrics = httpx.get(f"{address}/metrics").text
    assert "paceline:num_requests_running 0.0" in metrics
    assert "paceline:spec_decode_num_drafts_total" in metrics
    assert "paceline:spec_decode_request_acceptance_rate_count" in metrics
    assert 'paceline:spec_decode_drafter_draft_tokens_total{drafter="' in metrics
    assert httpx.get(f"{address}/health", headers={"X-Request-Id": "abc"}).headers["X-Request-Id"] == "abc"
