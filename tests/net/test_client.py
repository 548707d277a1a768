"""Pauses between attempts, bounds of what a server may send, and keys; what else servers do is in
tests/evals/test_endpoint.py."""

import asyncio
import gzip
import json
import time
from contextlib import contextmanager, suppress

import pytest

from paceline.net import client
from paceline.net.client import Client, Retry, find_models
from paceline.net.completion import CompletionError
from paceline.net.servers import get
from tests.web import Handler, serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ANSWER = json.dumps({"choices": [{"message": {"content": "ho"}, "finish_reason": "stop"}]}).encode()


@contextmanager
def bad(piece=ANSWER, endless=False, pause=0.0, status=200, first=0, **headers):
    """A server's address, and the headers of its requests. It answers with `piece`, without end where it is `endless`.

    first: the status of the first answer, where that is another."""
    asked = []

    class Bad(Handler):
        protocol_version, wbufsize = "HTTP/1.0", 0

        def do_POST(self):
            self.body()
            asked.append(dict(self.headers))
            self.begin(first if first and len(asked) == 1 else status, **headers)
            with suppress(ConnectionError):
                self.wfile.write(piece)
                while endless:
                    time.sleep(pause)
                    self.wfile.write(piece)

        do_GET = do_POST

    with serving(Bad) as url:
        yield url, asked


def ask(url, tries=1, key=None):
    async def one():
        async with Client([url], key=key, retry=Retry(tries, base=0.01, longest=0.05)) as made:
            return await made.complete(BODY)

    return asyncio.run(one())


def test_what_https_takes_is_made_once():
    """It takes tens of milliseconds, also for a client that asks by http alone."""
    first, other = (Client([url])._http._transport._pool._ssl_context for url in ("http://a/v1", "https://b/v1"))
    assert first is other


def test_pauses_grow_and_are_no_shorter_than_the_server_asks(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    async def attempt(number):
        raise client.Passing("busy", after={2: 0.25, 3: 9.0}.get(number, 0.0))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(client, "uniform", lambda low, high: high)
    with pytest.raises(CompletionError, match="busy; given up after 5 tries"):
        asyncio.run(Retry(tries=5, base=0.5, longest=1.5).run(attempt))
    assert pauses == [0.5, 1.0 + 0.25, 1.5 + 1.5, 1.5]


@pytest.mark.parametrize("after", ["nan", "-nan", "inf", "-inf", "-5", "1e999", "", "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_a_server_may_ask_to_wait_in_any_words(after):
    assert 0 <= client._seconds(after) <= float("inf")  # asyncio.sleep raises for NaN
    with bad(first=429, Retry_After=after) as (url, asked):
        assert (ask(url, tries=2).text, len(asked)) == ("ho", 2)


EVENTS = {
    "text": {"delta": {"content": "ho"}}, "tokens": {"delta": {}, "token_ids": [1, 2]},
    "log-probabilities": {"delta": {}, "logprobs": {"content": [{"token": "ho", "logprob": 0.0}]}},
    "tool arguments": {"delta": {"tool_calls": [{"function": {"arguments": "{{"}}]}},
}
ENDLESS = {
    **{
        name: {"piece": f"data: {json.dumps({'choices': [choice]})}\n\n".encode(), "Content_Type": "text/event-stream"}
        for name, choice in EVENTS.items()
    },
    "comments": {"piece": b": wait\n\n", "Content_Type": "text/event-stream"},
    "a line": {"piece": b"data", "Content_Type": "text/event-stream"},
    "a body": {"piece": b"[[[[", "Content_Type": "application/json"},
    "an error's body": {"piece": b"no!!", "status": 400},
    "a passing error's body": {"piece": b"no!!", "status": 503},
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_no_answer_fills_the_memory(kind, monkeypatch):
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    settings = dict(ENDLESS[kind])
    piece = settings.pop("piece")
    with bad(piece * (1 << 12), endless=True, **settings) as (url, asked):
        with pytest.raises(CompletionError, match=r"the answer of 127\.0\.0\.1 is longer than 1 MiB"):
            ask(url, tries=3)
        assert len(asked) == 1  # what is too long will be so again
        with pytest.raises(CompletionError, match="longer than 1 MiB"):
            asyncio.run(find_models(url))


def test_no_stream_lasts_for_ever(monkeypatch):
    monkeypatch.setattr(client, "MOST_SECONDS", 0.36)
    drips = bad(b": wait\n\n", endless=True, pause=0.02, Content_Type="text/event-stream")
    with drips as (url, _), pytest.raises(CompletionError, match=r"did not come to an end within 0\.0001 hours"):
        ask(url, tries=3)


def test_few_bytes_do_not_expand_to_many():
    with bad(gzip.compress(ANSWER), Content_Encoding="gzip") as (url, asked):
        with pytest.raises(CompletionError, match="compresses its answer"):
            ask(url, tries=3)
        assert asked[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_takes_no_key_along(status):
    with bad() as (other, asked), bad(status=status, Location=other) as (url, first):
        with pytest.raises(CompletionError, match=f"answered {status}"):
            ask(url, key="sk-mine")
        with pytest.raises(CompletionError):
            asyncio.run(find_models(url, "sk-mine"))
        assert get(url, "/metrics", "sk-mine") is None
        assert ({one["Authorization"] for one in first}, asked) == ({"Bearer sk-mine"}, [])
