"""Peer: an engine that answers requests in groups, in the thread that asks. All of a run get the same token ids and the
same limits."""

from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.formats.tokenizer import Tokenizer
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Body, Endpoint

ALIKE = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
"""Fields that the requests of a group share, unless an engine mixes them."""
TAKEN = frozenset({*ALIKE, "seed", "prediction"})
UNREAD = frozenset({"messages", "prompt", "logprobs", "return_token_ids"})


def sampling(params: SamplingParams) -> dict[str, Any]:
    """How tokens are drawn, as most engines spell it."""
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}


class Peer(Endpoint):
    """An endpoint over `answer`, which gets a group of requests at once. It reports no log-probabilities.

    tokenizer  reads and spells texts; None: all requests have token ids.
    ends       the model's end tokens, unless a request ignores them.
    guarded    whether it refuses requests that it is known to answer wrongly; a certificate must find these."""

    takes, mixes, guarded = TAKEN, False, True

    def __init__(self, name: str, slots: int, tokenizer: Tokenizer | None, ends: Sequence[int] = ()):
        super().__init__(slots)
        self.name, self.tokenizer, self.ends = name, tokenizer, tuple(ends)

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """Answer prompts together, `slots` at most. All end tokens are among the stop_token_ids."""

    def wake(self, seconds: float) -> None:
        import torch

        square = torch.ones(256, 256)
        began = perf_counter()
        while perf_counter() - began < seconds:
            torch.mm(square, square)

    async def complete(self, body: Body) -> Completion:
        return self.ask([body])[0]

    def ask(self, bodies: Sequence[Body], slots: int | None = None) -> list[Completion]:
        """Ask as `Endpoint.ask`, in groups of `slots` requests. Every group has its own seconds."""
        size, params = min(slots or self.slots, self.slots), [self._params(body) for body in bodies]
        groups, done = dict[Any, list[int]](), dict[int, Completion]()
        for i, one in enumerate(params):
            groups.setdefault(None if self.mixes else tuple(getattr(one, name) for name in ALIKE), []).append(i)
        for members in groups.values():
            for together in (members[i : i + size] for i in range(0, len(members), size)):
                self.check_time()
                found = self.answer([self._prompt(bodies[i]) for i in together], [params[i] for i in together])
                done |= zip(together, found, strict=True)
        for i, answered in done.items():
            if bodies[i].get("logprobs"):
                answered.logprobs = [{"token": self._spell(token), "logprob": None} for token in answered.tokens]
        return [done[i] for i in range(len(bodies))]

    def _params(self, body: Body) -> SamplingParams:
        fields = {name: value for name, value in body.items() if name not in UNREAD}
        if unknown := [name for name in fields if name not in TAKEN]:
            raise CompletionError(f"{self.name} does not take {', '.join(unknown)}")
        ends = (*fields.pop("stop_token_ids", ()), *(() if fields.get("ignore_eos") else self.ends))
        return SamplingParams(**fields, stop_token_ids=tuple(dict.fromkeys(ends)))

    def _prompt(self, body: Body) -> list[int]:
        if "prompt" in body:
            return list(map(int, body["prompt"]))
        assert self.tokenizer is not None
        if self.tokenizer.has_chat_template:
            return self.tokenizer.encode_chat(body["messages"])
        return self.tokenizer.encode("\n".join(one["content"] for one in body["messages"]))

    def _spell(self, token: int) -> str:
        """A token as servers spell it, special ones by their names."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.inner.decode([token]))
