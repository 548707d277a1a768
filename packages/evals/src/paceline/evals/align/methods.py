"""The methods, which lead from requests to an answer. `--method vanilla,align3,steps=132`.

Each is an async function of a `Task` and of its options, a dataclass. Align3, more-think and zero-think force a text
into the model's own turn: it becomes the prefix of the next request, which prefills it and does not decode it."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from paceline.draft.spec import Options, option, parse, values
from paceline.errors import MethodError, meant
from paceline.evals.align import prompts
from paceline.evals.align.backend import CLOSE, OPEN, Backend, Request, split_thought
from paceline.evals.align.judge import Scorer
from paceline.evals.align.options import Decoding
from paceline.evals.align.types import Call, Generation, Item, Output, Scenario
from paceline.net.completion import Completion


@dataclass(frozen=True)
class Setting:
    """Settings that all items of a run share.

    adversarial  ask the disguised prompts, not the plain ones.
    rules_first  put the rules before the query, so that all prompts of a scenario share a cached prefix; the official
                 prompt has them after it.
    opened       the server's chat template opens the thought.
    keep_open    take a thought that never ended as the answer, as the official code does."""

    decoding: Decoding = field(default_factory=Decoding)
    adversarial: bool = True
    rules_first: bool = False
    opened: bool = False
    keep_open: bool = False


@dataclass
class Task:
    """An item for a method. calls: those made so far. scorer: for methods that choose among answers."""

    item: Item
    scenario: Scenario
    backend: Backend
    setting: Setting
    scope: str = ""
    scorer: Scorer | None = None
    calls: list[Call] = field(default_factory=list)

    @property
    def query(self) -> str:
        return self.item.adversarial_prompt if self.setting.adversarial else self.item.prompt

    @property
    def turn(self) -> str:
        """The query with all rules."""
        return prompts.text("augmented", self.query, self.scenario, self.setting.rules_first)

    async def ask(
        self, messages: Sequence[prompts.Message], phase: str, *, max_tokens: int = 0, **more: Any
    ) -> Completion:
        """One completion; `calls` gets its cost. max_tokens 0: the run's. more: other fields of `Request`."""
        decoding = self.setting.decoding
        if max_tokens:
            decoding = replace(decoding, max_tokens=min(max_tokens, decoding.max_tokens))
        response, call = await self.backend.complete(Request(tuple(messages), decoding, phase, self.scope, **more))
        self.calls.append(call)
        return response

    async def answer(self, messages: Sequence[prompts.Message], phase: str = "answer", *, sample: int = 0) -> Output:
        """One completion without a prefix, split into thought and answer."""
        return self.split(await self.ask(messages, phase, sample=sample))

    async def answers(
        self, messages: Sequence[prompts.Message], phase: str, samples: range
    ) -> tuple[list[Output], list[float]]:
        """Ask for several answers at once. Returns them with their scores, -1e9 if there is no answer."""
        answers = await asyncio.gather(*(self.answer(messages, phase, sample=sample) for sample in samples))
        return answers, await asyncio.gather(*map(self._score, answers))

    async def _score(self, answer: Output) -> float:
        assert self.scorer is not None
        if answer.unanswered:
            return -1e9
        score, calls = await self.scorer.score(self.item, self.scenario, self.query, answer.response)
        self.calls += calls
        return score

    def split(self, response: Completion, thought: str | None = None) -> Output:
        """A response, split. thought: the forced thought that it continues, if any."""
        opened = self.setting.opened or self.backend.opened
        return split_thought(response, opened, thought, self.setting.keep_open)

    def done(self, answer: Output, **extra: object) -> Generation:
        """The generation of the last output. `extra["cut"]` names the earlier phases that ran out of budget."""
        if cut := [call.phase for call in self.calls[:-1] if call.finish_reason == "length"]:
            extra["cut"] = cut
        return Generation(**vars(answer), calls=self.calls, extra=extra)


async def raw(task: Task, _: None) -> Generation:
    """The query alone."""
    return task.done(await task.answer(prompts.chat(task.query)))


async def vanilla(task: Task, _: None) -> Generation:
    """The query with all rules."""
    return task.done(await task.answer(prompts.chat(task.turn)))


async def zero_think(task: Task, _: None) -> Generation:
    """Vanilla with an empty thought before the answer, so there are no thought tokens."""
    forced = f"{OPEN}\n\n{CLOSE}\n\n"
    response = await task.ask(prompts.chat(task.turn), "answer", prefix=forced, forced=forced)
    text = response.text.rpartition(CLOSE)[2].strip()
    return task.done(Output("", text, response.finish_reason, None if text else "the answer is empty"))


async def _think(task: Task, forced: Sequence[tuple[str, str]], step_tokens: int = 0) -> tuple[Completion, str]:
    """Make one thought over several requests. Returns the last response, and the prefix that it continues.

    forced       the phase of each request, and the text that is appended to the thought so far. All requests but the
                 last stop where the thought would end.
    step_tokens  most tokens of each request but the last; 0: the run's."""
    turn, prefix = prompts.chat(task.turn), ""
    *first, (last, final) = forced
    for phase, text in first:
        prefix += text
        response = await task.ask(turn, phase, prefix=prefix, forced=text, stop=(CLOSE,), max_tokens=step_tokens)
        prefix += response.text.rstrip()
    prefix += final
    return await task.ask(turn, last, prefix=prefix, forced=final), prefix


@dataclass(frozen=True)
class MoreThinkOptions(Options):
    passes: int = option(3, "requests, the one that answers included; the paper uses up to 3", least=1)


async def more_think(task: Task, options: MoreThinkOptions) -> Generation:
    """Append "Wait" where a thought ends, and let the model think again. One pass forces only the opening marker."""
    texts = [f"{OPEN}\n", *[f"\n\n{prompts.WAIT}"] * (options.passes - 1)]
    response, prefix = await _think(task, [(f"pass {n}", text) for n, text in enumerate(texts, 1)])
    return task.done(task.split(response, prefix.removeprefix(OPEN)))


@dataclass(frozen=True)
class Align3Options(Options):
    steps: str = option("123", "1 behaviour, 2 safety, 3 audit of all rules: any subset in any order")
    step_tokens: int = option(0, "most tokens of each step but the last; 0: as --max-tokens", least=0)
    close: bool = option(False, "end a thought that runs out of its budget, and ask for the answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.steps or set(self.steps) - set("123") or len(set(self.steps)) < len(self.steps):
            raise MethodError(f"align3: steps is {self.steps!r}; write 1, 2 and 3 in any order, each at most once.")


async def align3(task: Task, options: Align3Options) -> Generation:
    """One thought that deliberates on the rules (Zhang et al. 2025, arXiv 2509.14760, section 4). It begins with the
    behavioural rules (step 1). Where it would end, the safety rules are inserted (step 2), then all rules (step 3)."""
    glue = [f"{OPEN}\n", *["\n\n"] * (len(options.steps) - 1)]
    steps = zip(glue, options.steps, strict=True)
    forced = [(f"step {step}", g + prompts.text("step", step, task.scenario)) for g, step in steps]
    response, prefix = await _think(task, forced, options.step_tokens)
    answer = task.split(response, prefix.removeprefix(OPEN))
    if answer.open and options.close:
        end = f"\n{CLOSE}\n\n"
        prefix += response.text.rstrip() + end
        response = await task.ask(prompts.chat(task.turn), "answer", prefix=prefix, forced=end)
        answer = task.split(replace(response, text=end + response.text), answer.thought)
    return task.done(answer)


@dataclass(frozen=True)
class SelfRefineOptions(Options):
    iterations: int = option(3, "rounds of feedback and rewriting; paper 15, official code 3", least=0)
    history: int = option(1, "answers, each with its feedback, that a rewriting sees", least=1)


async def self_refine(task: Task, options: SelfRefineOptions) -> Generation:
    """Answer, then repeat: feedback on every rule, and a rewritten answer (Madaan et al. 2023, arXiv 2303.17651, as in
    the paper on Align3). Feedback sees the query and the rules; the rewriting sees the query, the last answers and
    their feedback, but no rules. If a rewriting fails, the previous answer is kept."""
    best = await task.answer(prompts.chat(task.turn))
    if best.unanswered:
        return task.done(best)
    history: list[tuple[str, str]] = []
    for _ in range(options.iterations):
        review = prompts.chat(best.response, prompts.text("review", task.query, task.scenario))
        feedback = await task.answer(review, "feedback")
        history = [*history, (best.response, feedback.response)][-options.history :]
        improve = prompts.chat(prompts.text("refine", history), prompts.text("improve", task.query))
        better = await task.answer(improve, "refine")
        best = best if better.unanswered else better
    return task.done(replace(best, thought=""))


@dataclass(frozen=True)
class BestOfNOptions(Options):
    n: int = option(15, "answers to choose from; paper 15", least=1)


async def best_of_n(task: Task, options: BestOfNOptions) -> Generation:
    """The answer with the highest score; a single answer is not scored. The paper describes it and has no code."""
    if options.n == 1:
        return task.done(await task.answer(prompts.chat(task.turn)), scores=[0.0], chosen=0)
    return _best(task, *await task.answers(prompts.chat(task.turn), "answer", range(options.n)))


def _best(task: Task, answers: list[Output], scores: list[float]) -> Generation:
    chosen = scores.index(max(scores))
    return task.done(answers[chosen], scores=scores, chosen=chosen)


@dataclass(frozen=True)
class TpoOptions(Options):
    samples: int = option(5, "answers a round; paper 5", least=1)
    rounds: int = option(2, "rounds of critique and revision after the first answers; paper 2", least=0)


async def tpo(task: Task, options: TpoOptions) -> Generation:
    """Test-time preference optimisation: a critique of the best against the worst answer steers the next ones.

    Li et al. 2025 (arXiv 2501.12895). samples = 5 and rounds = 2 make the 15 answers of the paper on Align3, which has
    no code for it: this follows its description and the known algorithm."""
    turn, n = task.turn, options.samples
    answers, scores = await task.answers(prompts.chat(turn), "answer", range(n))
    for start in range(n, n * (options.rounds + 1), n):
        best, worst = (answers[scores.index(extreme(scores))].response for extreme in (max, min))
        critique = await task.answer(prompts.chat(prompts.text("critique", turn, best, worst)), "critique")
        gradient = await task.answer(prompts.chat(prompts.text("gradient", turn, critique.response)), "gradient")
        revised = prompts.text("revision", turn, best, gradient.response)
        more = await task.answers(prompts.chat(revised), "revise", range(start, start + n))
        answers, scores = answers + more[0], scores + more[1]
    return _best(task, answers, scores)


METHODS: dict[str, tuple[Callable[[Task, Any], Awaitable[Generation]], type | None]] = {
    "raw": (raw, None),
    "vanilla": (vanilla, None),
    "zero-think": (zero_think, None),
    "more-think": (more_think, MoreThinkOptions),
    "align3": (align3, Align3Options),
    "self-refine": (self_refine, SelfRefineOptions),
    "best-of-n": (best_of_n, BestOfNOptions),
    "tpo": (tpo, TpoOptions),
}


@dataclass(frozen=True)
class Method:
    name: str
    options: Any = None

    async def __call__(self, task: Task) -> Generation:
        return await METHODS[self.name][0](task, self.options)

    @property
    def label(self) -> str:
        """The name and the options that are not its defaults: "align3,steps=13"."""
        own = [(f, getattr(self.options, f.name)) for f in fields(self.options)] if self.options is not None else []
        return ",".join([self.name, *(f"{f.name}={str(value).lower()}" for f, value in own if value != f.default)])

    @property
    def identity(self) -> list[Any]:
        """The name and every option, defaults included, which decide the outcome."""
        return [self.name, None if self.options is None else asdict(self.options)]

    @property
    def chooses(self) -> bool:
        """Whether it needs a scorer."""
        return self.name == "tpo" or (self.name == "best-of-n" and self.options.n > 1)


def read_methods(spec: str) -> list[Method]:
    """The methods in "name[,option=value...],name...". MethodError for unknown ones, bad options and repetitions."""
    methods: list[Method] = []
    for text in re.split(r",(?!\s*[A-Za-z_][\w-]*\s*=)", spec):
        if text.strip():
            method = _method(text.strip())
            if method in methods:
                raise MethodError(f"{method.label} is named twice.")
            methods.append(method)
    if not methods:
        raise MethodError(f"name a method: {', '.join(METHODS)}.")
    return methods


def _method(text: str) -> Method:
    part = parse(text)
    name = part.name.replace("_", "-")
    if name not in METHODS:
        raise MethodError(f"there is no method {part.name!r}; there are {', '.join(METHODS)}.{meant(name, METHODS)}")
    kind = METHODS[name][1]
    if kind is None and (part.options or part.checkpoint):
        raise MethodError(f"{name} has no options.")
    return Method(name, None if kind is None else kind(**values(part, kind)))
