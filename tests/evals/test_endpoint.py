"""The HTTP client against a real server with every trouble servers have."""

import asyncio
import json

import pytest

from paceline.evals.align.backend import Backend, Request
from paceline.evals.align.options import Decoding
from paceline.net.client import Retry, find_model, parse
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Remote
from paceline.target.load import load_tokenizer
from tests import models
from tests.evals.endpoint import Scripted
from tests.evals.fakes import complete

QUICK = Retry(tries=6, base=0.01, longest=0.05)
TURNS = ({"role": "system", "content": "s"}, {"role": "user", "content": "hello there"})


def ask(endpoint, *requests, urls=None, **options):
    """Replies, or the errors instead, to requests sent at once."""

    async def all_of_them():
        shown = {name: options.pop(name) for name in ("tokenizer", "stream") if name in options}
        at = ",".join(urls or [endpoint.url])
        client = Backend(Remote(f"{at}#scripted", **({"retry": QUICK, "timeout": 0.5} | options)), "scripted", **shown)
        try:
            return await asyncio.gather(*(complete(client, one) for one in requests), return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(all_of_them())


def request(text="hello there", **changes):
    turns = (TURNS[0], {"role": "user", "content": text})
    return Request(turns, Decoding(50, 0.5, seed=7), "answer", **changes)


def echo(body):
    return f"you said: {body['messages'][-1]['content']}"


def test_a_response_with_its_account():
    with Scripted(echo) as server:
        (reply,) = ask(server, request())
    assert reply.text == "you said: hello there"
    call = reply.call
    assert (call.prefilled, call.generated, call.tries, call.finish_reason) == (3, 4, 1, "stop")
    (body,) = server.requests
    assert body["path"] == "/v1/chat/completions"
    assert (body["temperature"], body["seed"], body["max_tokens"], body["stream"]) == (0.5, 7, 50, True)
    assert "top_p" not in body


def test_without_streams_and_without_usage():
    with Scripted(lambda body: "half \ud83d of it", usage=False) as server:
        (reply,) = ask(server, request(), stream=False)
    assert reply.text == "half ? of it"  # what no file can hold is mended
    assert (reply.call.prefilled, reply.call.generated) == (None, None)


def test_samples_have_seeds_of_their_own():
    with Scripted(echo) as server:
        ask(server, request(), request(sample=2))
    assert sorted(body["seed"] for body in server.requests) == [7, 9]


@pytest.mark.parametrize("trouble", ["429", "500", "503", "408", "torn", "reset", "garbage", "cut", "hang"])
def test_what_passes_is_tried_again(trouble):
    with Scripted(echo, lambda body, attempt: trouble if attempt <= 2 else None) as server:
        (reply,) = ask(server, request())
    assert (reply.text, reply.call.tries) == ("you said: hello there", 3)


@pytest.mark.parametrize(("status", "asked", "says"), [("500", 6, "after 6 tries"), ("401", 1, "answered 401")])
def test_what_does_not_pass_is_given_up(status, asked, says):
    with Scripted(echo, lambda body, attempt: status) as server:
        (error,) = ask(server, request(), key="sk-secret")
    assert isinstance(error, CompletionError)
    assert says in str(error)
    assert len(server.requests) == asked
    assert "sk-secret" not in str(error) + json.dumps(server.requests)


def test_an_answer_that_stays_cut_short_is_taken_with_its_reason():
    with Scripted(echo, lambda body, attempt: "cut") as server:
        (reply,) = ask(server, request())
    assert ((reply.text, reply.finish_reason), len(server.requests)) == (("you said: ", "length"), 3)


def test_hosts_take_turns_and_one_that_is_down_is_left_to_the_others():
    many = [request(f"number {n}") for n in range(8)]
    with Scripted(echo) as one, Scripted(echo) as two:
        ask(one, *many, urls=[one.url, two.url], slots=2)
        assert len(one.requests) == len(two.requests) == 4
        replies = ask(one, *many, urls=["http://127.0.0.1:9/v1", one.url])
    assert all(isinstance(reply, Completion) for reply in replies)


def test_a_storm_of_429_keeps_to_the_slots_and_ends():
    with Scripted(echo, slots=2, delay=0.01) as server:
        patient = Retry(tries=60, base=0.01, longest=0.1)
        replies = ask(server, *[request(f"number {n}") for n in range(40)], slots=8, retry=patient)
    assert [r.text for r in replies] == [f"you said: number {n}" for n in range(40)]
    assert server.statuses[429] > 0
    assert server.most_at_once <= 8
    assert server.most_busy <= 2


def test_a_prefix_goes_as_a_message_to_continue_and_a_schema_as_the_response_format():
    with Scripted(echo) as server:
        ask(server, request(prefix="<think>\nso", stop=("</think>",), schema={"type": "object"}))
    (body,) = server.requests
    assert body["messages"][-1] == {"role": "assistant", "content": "<think>\nso"}
    assert (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)
    assert (body["stop"], body["response_format"]["json_schema"]["schema"]) == (["</think>"], {"type": "object"})


def test_with_a_tokenizer_a_prefix_is_rendered_here_and_injections_are_counted(tmp_path):
    models.tokenizer().save_pretrained(tmp_path)
    with Scripted(lambda body: "more") as server:
        (reply,) = ask(server, request(prefix="the cat and", forced="and"), tokenizer=load_tokenizer(tmp_path))
    (body,) = server.requests
    assert body["path"] == "/v1/completions"
    assert body["prompt"] == "<s><|system|>s</s><|user|>hello there</s><|assistant|>the cat and"
    assert body["add_special_tokens"] is False
    assert reply.text == "more"
    assert 1 <= reply.call.injected <= 3


def test_the_model_is_found_out_or_asked_for():
    with Scripted(echo) as server:
        assert asyncio.run(find_model(server.url)) == "scripted"
    with pytest.raises(CompletionError, match="is the server up"):
        asyncio.run(find_model("http://127.0.0.1:9/v1"))
    assert parse("http://a/v1, http://b/v1#Qwen/Qwen3") == (["http://a/v1", "http://b/v1"], "Qwen/Qwen3")
