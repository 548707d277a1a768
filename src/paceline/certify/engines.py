"""UnderTest: the engine that is to be certified, whatever it is. It gets token ids and gives token ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from paceline import __version__
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.base import Target
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.contestant import SAMPLING, Ask, Contestant, Reply


class UnderTest(ABC):
    """An engine with its drafter.

    name, facts  for the certificate: what it is, and on which versions it runs.
    batch        the most requests it answers at once; mixes: they may be asked for differently.
    takes        fields of SamplingParams that it honours, other than temperature, seed and max_tokens."""

    name: str
    facts: dict[str, Any]
    batch: int = 1
    mixes: bool = False
    takes: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Reply]:
        """Answer all of them, as many together as it can."""

    def close(self) -> None:  # noqa: B027
        """Give memory and processes back."""

    def honours(self, params: SamplingParams) -> bool:
        """Whether it takes all that `params` changes of the defaults."""
        plain, known = SamplingParams(), {"temperature", "seed", "max_tokens", "ignore_eos", *self.takes}
        return all(name in known or getattr(params, name) == getattr(plain, name) for name in params.option_names())


class Ours(UnderTest):
    """Our engine. draft: a spec, or what makes the drafter of a new engine. options: others of `Engine`."""

    takes = frozenset(
        {
            "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
            "bad_words", "stop", "stop_token_ids",
        }
    )  # fmt: skip

    def __init__(
        self, target: Target, tokenizer: Tokenizer | None, draft: str | Callable[[], Drafter], *, batch: int = 8,
        **options: Any,
    ):  # fmt: skip
        drafter = create(draft) if isinstance(draft, str) else draft()
        self.engine = Engine(target, drafter, tokenizer=tokenizer, max_batch=batch, **options)
        self.batch, self.mixes = batch, True
        self.name = f"paceline, {drafter.name}"
        self.facts = {"engine": f"paceline {__version__}", "dtype": str(target.dtype).removeprefix("torch.")}

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Reply]:
        rounds: list[list[tuple[int, int]]] = [[] for _ in prompts]
        done = self.engine.generate(
            [list(prompt) for prompt in prompts],
            list(params),
            progress=lambda delta: rounds[delta.index].append((len(delta.tokens), delta.nodes)),
        )
        if failed := next((one.error for one in done if one.error), ""):
            raise PacelineError(f"{self.name} failed: {failed}")
        return [
            Reply(
                one.prompt_tokens,
                one.tokens,
                one.text,
                one.seconds,
                lengths=[length for length, _ in of],
                nodes=[nodes for _, nodes in of],
                finish=one.finish_reason,
            )
            for one, of in zip(done, rounds, strict=True)
        ]


class Host(UnderTest):
    """Another library, a contestant; opened here, closed by `close`. A batch holds requests that are asked alike."""

    takes = frozenset(SAMPLING)

    def __init__(self, contestant: Contestant, ends: Sequence[int]):
        self.contestant, self.ends = contestant, tuple(ends)
        if hasattr(contestant, "guarded"):
            contestant.guarded = False  # a certificate is to find what is known to go wrong
        try:
            contestant.open()
        except BaseException:
            contestant.close()
            raise
        self.name, self.batch = contestant.name, contestant.max_batch
        self.facts: dict[str, Any] = contestant.settings

    def close(self) -> None:
        self.contestant.close()

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Reply]:
        alike: dict[Ask, list[int]] = {}
        for i, one in enumerate(params):
            sampling = {name: getattr(one, name) for name in SAMPLING}
            ask = Ask(one.max_tokens, ends=() if one.ignore_eos else self.ends, **sampling)
            alike.setdefault(ask, []).append(i)
        by_index: dict[int, Reply] = {}
        for ask, members in alike.items():
            for begin in range(0, len(members), self.batch):
                together = members[begin : begin + self.batch]
                seeds = tuple(params[i].seed or 0 for i in together)
                replies = self.contestant.answer([prompts[i] for i in together], replace(ask, seeds=seeds))
                by_index |= dict(zip(together, replies, strict=True))
        return [by_index[i] for i in range(len(prompts))]
