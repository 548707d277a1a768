"""What is certified: endpoints. An engine of this process is one (`paceline.serve.local.Local`), and so is another
library through `Library`. Both take prompts of token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.formats.tokenizer import Tokenizer
from paceline.net.client import Completion, CompletionError
from paceline.net.endpoint import Body, Endpoint
from paceline.peers.contestant import SAMPLING, Ask, Contestant, Reply
from paceline.serve.local import Local
from paceline.target.base import Target

UNREAD = frozenset({"messages", "prompt", "logprobs", "return_token_ids"})
TAKEN = frozenset({"temperature", "seed", "max_tokens", "ignore_eos", *SAMPLING})  # fields that a contestant takes


def local(
    target: Target, tokenizer: Tokenizer | None, draft: str | Callable[[], Drafter], *, batch: int = 8, **options: Any
) -> Local:
    """Our engine. draft: a spec, or what makes a drafter; options: others of `Engine`."""
    drafter = create(draft) if isinstance(draft, str) else draft()
    engine = Engine(target, drafter, tokenizer=tokenizer, max_batch=batch, **options)
    return Local(engine, f"paceline, {drafter.name}", slots=batch)


class Library(Endpoint):
    """Another library, a contestant; opened here, closed by `close`. A batch holds requests that are asked alike. It
    reports no log-probabilities."""

    takes, mixes = TAKEN, False

    def __init__(self, contestant: Contestant, tokenizer: Tokenizer | None, ends: Sequence[int]):
        if hasattr(contestant, "guarded"):
            contestant.guarded = False  # a certificate is to find what is known to go wrong
        try:
            contestant.open()
        except BaseException:
            contestant.close()
            raise
        super().__init__(contestant.max_batch)
        self.contestant, self.tokenizer, self.ends = contestant, tokenizer, tuple(ends)
        self.name, self.facts = contestant.name, contestant.settings

    def close(self) -> None:
        super().close()
        self.contestant.close()

    async def complete(self, body: Body) -> Completion:
        raise NotImplementedError("a library is asked for several answers at once, by `ask`")

    def ask(self, bodies: Sequence[Body], slots: int | None = None) -> list[Completion]:
        size, params = min(slots or self.slots, self.slots), [self._params(body) for body in bodies]
        alike, done = dict[Ask, list[int]](), dict[int, Completion]()
        for i, one in enumerate(params):
            sampling = {name: getattr(one, name) for name in SAMPLING}
            asked = Ask(one.max_tokens, ends=() if one.ignore_eos else self.ends, **sampling)
            alike.setdefault(asked, []).append(i)
        for asked, members in alike.items():
            for together in (members[i : i + size] for i in range(0, len(members), size)):
                self.check_time()
                how = replace(asked, seeds=tuple(params[i].seed or 0 for i in together))
                replies = self.contestant.answer([self._prompt(bodies[i]) for i in together], how)
                done |= zip(together, map(self._completion, replies), strict=True)
        return [done[i] for i in range(len(bodies))]

    def _completion(self, reply: Reply) -> Completion:
        counts = {} if reply.lengths is None else {"num_rounds": len(reply.lengths)}
        counts |= {} if reply.nodes is None else {"num_draft_tokens": sum(reply.nodes)}
        spelt = [{"token": self._spell(token), "logprob": None} for token in reply.tokens]
        return Completion(
            reply.text, finish_reason=reply.finish, tokens=reply.tokens, logprobs=spelt, speculation=counts
        )

    def _params(self, body: Body) -> SamplingParams:
        fields = {name: value for name, value in body.items() if name not in UNREAD}
        if unknown := [name for name in fields if name not in TAKEN]:
            raise CompletionError(f"{self.name} does not take {', '.join(unknown)}")
        return SamplingParams(**fields)

    def _prompt(self, body: Body) -> list[int]:
        if "prompt" in body:
            return list(body["prompt"])
        assert self.tokenizer is not None
        if self.tokenizer.has_chat_template:
            return self.tokenizer.encode_chat(body["messages"])
        return self.tokenizer.encode("\n".join(one["content"] for one in body["messages"]))

    def _spell(self, token: int) -> str:
        """A token as servers spell it, special ones by their names."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.inner.decode([token]))


def takes(engine: Endpoint, fields: Body) -> bool:
    """Whether an engine takes these fields of a request."""
    return engine.takes is None or fields.keys() <= engine.takes


def request(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A request for the answer to a prompt of token ids, with its tokens; greedy unless `fields` say otherwise."""
    return {"prompt": list(prompt), "return_token_ids": True, "temperature": 0.0, **fields}
