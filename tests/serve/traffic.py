"""Clients of every kind at once, each answer held to the one the engine gives to that request alone.

    traffic = Traffic(150, kinds=60, seed=1)
    traffic.run(address, key="right", clients=64)
    traffic.check(engine)                     # AssertionError where an answer is lost, mixed up or not refused

Some clients leave in the middle of their answer, send what is no request, have no key or break off halfway through the
request; no answer is expected for those, and nobody else may notice.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np

from paceline.core.sampling import SamplingParams
from paceline.serve.structure import Grammars

WORDS = ["the", "cat", "and", "dog", "sat", "on", "mat", "there", "was", "a", "little", "then", "said", "hello"]
SCHEMAS = [
    {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
    {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"],
        "additionalProperties": False,
    },
]
FATES = {"": 0.4, "stream": 0.35, "leave": 0.1, "malformed": 0.08, "key": 0.04, "half": 0.03}
MALFORMED = [
    b"{nope",
    b"[]",
    b'{"prompt": "the cat", "best_of": 3}',
    b'{"prompt": "the cat", "temperature": -1}',
    b'{"prompt": [999999]}',
    b'{"prompt": ""}',
    b'{"prompt": "the cat", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "the cat", "max_tokens": "many"}',
    b'{"messages": [{"role": "user", "content": "' + b"x" * 70_000 + b'"}]}',
]


@dataclass(frozen=True)
class Planned:
    """A request: kind is the number of what it asks for, and requests of a kind have the same answer."""

    kind: int
    fate: str


class Traffic:
    """`count` requests of `kinds` kinds. answers: by number of the request, those of every choice."""

    def __init__(self, count, kinds, seed):
        self.rng = np.random.default_rng(seed)
        self.bodies = [self._body(i) for i in range(kinds)]
        fates = self.rng.choice(list(FATES), size=count, p=list(FATES.values()))
        self.planned = [Planned(i % kinds, str(fate)) for i, fate in enumerate(fates)]
        self.answers = {}
        self.outcomes = Counter()

    def _body(self, kind):
        """A text completion or, without a schema in half the cases, a chat."""
        rng = self.rng
        text = " ".join(rng.choice(WORDS, int(rng.choice([1, 4, 20, 90]))))
        body = {"messages": [{"role": "user", "content": text}]} if kind % 2 else {"prompt": text}
        body |= {"seed": kind, "temperature": float(rng.choice([0.0, 0.7, 1.2])), "n": int(rng.choice([1, 1, 1, 2]))}
        body["max_tokens"] = int(min(1 + rng.geometric(1 / 16), 120))
        if rng.random() < 0.3:
            schema = SCHEMAS[kind % len(SCHEMAS)]
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        elif rng.random() < 0.3:
            body["stop"] = ["e", "at"]
        if rng.random() < 0.3:
            body["draft"] = str(rng.choice(["suffix", "none"]))
        return body

    def run(self, address, key, clients=64):
        """Send all of them, `clients` at once."""
        asyncio.run(self._run(address, key, clients))

    async def _run(self, address, key, clients):
        left = iter(enumerate(self.planned))
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits, headers=headers) as http:

            async def client():
                for number, planned in left:
                    self.outcomes[await self._ask(http, number, planned)] += 1

            await asyncio.gather(*(client() for _ in range(clients)))

    async def _ask(self, http, number, planned):
        """Send one, keep its answer, and return what became of it."""
        body = self.bodies[planned.kind]
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        if planned.fate == "malformed":
            reply = await http.post("/v1/completions", content=MALFORMED[number % len(MALFORMED)])
            assert reply.status_code in (400, 413), (reply.status_code, reply.text)
            assert reply.json()["error"]["message"]
        elif planned.fate == "key":
            reply = await http.post(path, json=body, headers={"Authorization": "Bearer wrong"})
            assert reply.status_code == 401, reply.text
        elif planned.fate == "half":
            await _break_off(http, path, json.dumps(body))
        elif planned.fate == "":
            reply = await http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            self.answers[number] = [_text(choice) for choice in reply.json()["choices"]]
        elif planned.fate == "stream":
            await self._streamed(http, path, number, body)
        elif number % 2:
            async with http.stream("POST", path, json={**body, "stream": True, "max_tokens": 500}) as reply:
                async for _ in reply.aiter_lines():
                    break
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(http.post(path, json={**body, "max_tokens": 500}), 0.05)
        return planned.fate or "whole"

    async def _streamed(self, http, path, number, body):
        texts, ended = [""] * body["n"], 0
        async with http.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            lines = [line[6:] async for line in reply.aiter_lines() if line]
        assert lines.pop() == "[DONE]"
        for event in map(json.loads, lines):
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] += _text(choice)
                ended += choice["finish_reason"] is not None
        assert ended == body["n"]
        self.answers[number] = texts

    def check(self, alone):
        """Hold every answer to the one that `alone` gives."""
        expected = [self._expected(alone, body) for body in self.bodies]
        wanted = [i for i, planned in enumerate(self.planned) if planned.fate in ("", "stream")]
        assert sorted(self.answers) == wanted, "answers were lost"
        mixed = [i for i in wanted if self.answers[i] != expected[self.planned[i].kind]]
        assert not mixed, [(i, self.answers[i], expected[self.planned[i].kind]) for i in mixed[:3]]
        assert sum(self.outcomes.values()) == len(self.planned)

    @staticmethod
    def _expected(alone, body):
        assert alone.tokenizer is not None
        target = alone.target
        grammars = Grammars(alone.tokenizer, target.vocab_size, target.eos_token_ids)
        given = {name: body[name] for name in ("temperature", "max_tokens", "seed", "stop") if name in body}
        params = SamplingParams(**given)
        texts = []
        for i in range(body["n"]):
            schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
            grammar = None if schema is None else grammars.json_schema(schema)
            own = replace(params, seed=body["seed"] + i, grammar=grammar)
            texts.append(alone.generate([body.get("messages") or body["prompt"]], own)[0].text)
        return texts


def _text(choice):
    """A choice's text, of a chat or a text completion, whole or in pieces."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


async def _break_off(http, path, body):
    """Send a request up to its middle and leave."""
    to = urlsplit(str(http.base_url))
    _, writer = await asyncio.open_connection(to.hostname, to.port)
    head = f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: {http.headers['Authorization']}\r\n\r\n"
    writer.write((head + body[: len(body) // 2]).encode())
    await writer.drain()
    writer.close()
