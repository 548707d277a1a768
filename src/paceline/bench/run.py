"""A benchmark from its options to its figures: `bench(Plan(...))` is what `paceline bench` does.

    outcome = bench(Plan("models/demo", drafts=("sam",), suite="demo", out=Path("run")))
    outcome.results[0]["speedup"]

Calibrates the cost model, lets the runner ask every contestant, finds out why answers differ that should not, works
out the figures and writes the files that others read. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.bench import specbench
from paceline.bench.contestant import Contestant
from paceline.bench.disturbance import disturbances
from paceline.bench.environment import environment, machine
from paceline.bench.folder import RUN, SUMMARY, RunFolder, answers_of, calibrated, calibrations_of, check
from paceline.bench.judge import Judge
from paceline.bench.large import Enlargement, large_folder, parse_size
from paceline.bench.large_draft import large_draft_model, large_spec
from paceline.bench.metrics import BASELINE, first_divergence, summarize
from paceline.bench.ours import Ours
from paceline.bench.peers import create_peer, parse_peer
from paceline.bench.record import Answer, settled
from paceline.bench.runner import Group, LeftOut, Options, Runner, answered, fitting, grouped, has_answered
from paceline.bench.suites import Question, Suite, read_suite
from paceline.cost.calibration import Calibration
from paceline.cost.calibrations import Calibrations
from paceline.cost.model import DEVICES, Machine, Size, predict
from paceline.cost.predict import predict_run, recorded_rounds
from paceline.draft.registry import create
from paceline.engine import Engine
from paceline.errors import PacelineError, PromptError
from paceline.replay.tokens import Transcriber
from paceline.target.base import Target
from paceline.target.load import SMALL_FILES, find, load, load_tokenizer, read_config
from paceline.target.shape import unsupported
from paceline.target.tokenizer import Tokenizer
from paceline.threads import Threads

JUDGED = 20
"""Differing answers of a method that are looked into; a method that differs more often has a common cause."""


@dataclass(frozen=True)
class Plan:
    """What to run. drafts and peers: specs; plain decoding ("none") is always there, as what others are compared to.

    as_large  "1B" and the like: the model, and every draft model, enlarged without changing what it says.
    template  the chat template, as for replay; None: the tokenizer's own.
    calibration  the folder of another run of this model on this machine, whose calibrations are taken."""

    model: str
    drafts: Sequence[str] = ()
    peers: Sequence[str] = ()
    suite: str = "demo"
    out: Path = Path("bench")
    limit: int | None = None
    categories: Sequence[str] = ()
    options: Options = field(default_factory=Options)
    as_large: str | None = None
    template: str | None = None
    peer_python: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    calibrate: bool = True
    calibration: Path | None = None


@dataclass(frozen=True)
class Watch:
    """What a run tells whoever waits for it. say: a sentence; total: answers there will be; answered: one more; judged:
    so many of so many differing answers are."""

    say: Callable[[str], None] = lambda text: None
    total: Callable[[int], None] = lambda count: None
    answered: Callable[[Answer], None] = lambda answer: None
    judged: Callable[[int, int], None] = lambda done, total: None
    stopped: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Outcome:
    """results: one dict per method and category, see `metrics.summarize`; notes: what else there is to say;
    disturbed: see `disturbance.disturbances`."""

    out: Path
    complete: bool
    results: list[dict[str, Any]]
    unavailable: dict[str, str]
    notes: list[str]
    disturbed: list[str]


@dataclass
class _Setting:
    """Everything that is loaded."""

    folder: Path
    target: Target
    tokenizer: Tokenizer
    transcriber: Transcriber
    suite: Suite
    groups: list[Group]
    left_out: list[LeftOut]
    enlarged: str | None

    def question(self, id: str) -> Question:
        """The question of that id."""
        return next(question for question in self.suite.questions if question.id == id)


def bench(plan: Plan, watch: Watch = Watch()) -> Outcome:
    """Run, or go on with, the benchmark in `plan.out`.

    Raises PacelineError for what the caller has to mend, before anything is timed."""
    # What is misspelt is named before a large model is read, another run's folder before an engine is started.
    for spec in plan.drafts:
        create(spec)
    for spec in plan.peers:
        parse_peer(spec)
    setting = _set_up(plan, watch)
    contestants = _contestants(plan, setting)
    identity = _identity(plan, setting, contestants)
    check(plan.out, identity)
    known = calibrations_of(plan.calibration, identity) if plan.calibration else {}
    idle = _idle(plan, setting, contestants, known)
    try:
        unavailable = _open([contestant for contestant in contestants if contestant.name not in idle], watch)
        present = [contestant for contestant in contestants if contestant.name not in unavailable]
        opened = [contestant for contestant in present if contestant.name not in idle]
        with RunFolder.open(plan.out, identity | _describe(plan, setting, contestants, unavailable)) as folder:
            folder.describe(_methods(opened))  # a peer may have been installed since the run began
            calibrations = None
            if plan.calibrate:
                engine = Engine(setting.target, "none", max_batch=plan.options.batch, tokenizer=setting.tokenizer)
                calibrations = Calibrations(folder, engine, known)
                calibrations.before(present, watch.say, watch.stopped, idle)
            complete = _run(plan, setting, folder, present, calibrations, watch)
            if calibrations is not None:
                calibrations.after(settled(folder.answers))
            folder.describe(_methods(opened))  # what a draft weighs may be a mean of what it did
            _put_away(contestants)  # what comes now may load the model once more, in float32
            found = calibrations.found if calibrations else {}
            return _close(plan, setting, folder, unavailable, found, complete, watch)
    finally:
        _put_away(contestants)


def _put_away(contestants: list[Contestant]) -> None:
    """Close all that are still open."""
    while contestants:
        contestants.pop().close()


# What is needed ---------------------------------------------------------------------------------------------------


def _set_up(plan: Plan, watch: Watch) -> _Setting:
    suite = read_suite(plan.suite, limit=plan.limit, categories=plan.categories)
    size = parse_size(plan.as_large) if plan.as_large else 0
    folder, enlarged = find(plan.model, [*SMALL_FILES, "*.safetensors"]), None
    if size:
        watch.say(f"enlarging {plan.model} to {plan.as_large}")
        folder = large_folder(folder, size)
        enlarged = Enlargement.read(folder).describe()
    target = load(folder, dtype=plan.dtype, device=plan.device)
    target.threads = Threads(torch.get_num_threads())  # the same for all that is compared, from beginning to end
    tokenizer = load_tokenizer(folder)
    transcriber = Transcriber(tokenizer, plan.template)
    fit, left_out = fitting(
        suite.questions, transcriber.prompt, max_context=target.max_context, max_tokens=plan.options.max_tokens
    )
    if not fit:
        raise PromptError(f"no question of {suite.name} fits: {left_out[0].why}; try a smaller --max-tokens")
    groups = grouped(fit, plan.options.batch)
    return _Setting(folder, target, tokenizer, transcriber, suite, groups, left_out, enlarged)


def _contestants(plan: Plan, setting: _Setting) -> list[Contestant]:
    """Plain decoding first, then our drafters, then the peers."""
    target, tokenizer, batch = setting.target, setting.tokenizer, plan.options.batch
    done = Enlargement.read(setting.folder) if plan.as_large else None
    target.tokenizer = tokenizer  # what an adapter was trained for is told by both
    ours = [
        Ours(spec, target, tokenizer, batch=batch, put=large_spec(spec, target, done) if done else None)
        for spec in dict.fromkeys(["none", *plan.drafts])
    ]
    return [*ours, *(_peer(spec, plan, setting) for spec in dict.fromkeys(plan.peers))]


def _peer(spec: str, plan: Plan, setting: _Setting) -> Contestant:
    """A peer, its draft model enlarged like the target."""
    _, config = parse_peer(spec)
    checkpoint = getattr(config, "checkpoint", None)
    put = spec
    if plan.as_large and checkpoint:
        put = spec.replace(checkpoint, str(_in_proportion(spec, checkpoint, setting.folder)), 1)
    peer = create_peer(
        put,
        str(setting.folder),
        dtype=_dtype_name(setting.target),
        threads=torch.get_num_threads(),
        python=plan.peer_python,
        batch=plan.options.batch,
        max_context=setting.target.max_context,
        decode=setting.tokenizer.decode,
        device=str(setting.target.device),
    )
    peer.name = f"peer:{spec}"
    return peer


def _in_proportion(spec: str, checkpoint: str, target: Path) -> Path:
    """The draft model `checkpoint`, as many times larger as the target was made."""
    if not Path(checkpoint).is_dir():
        raise PacelineError(f"--peer {spec}: --as-large enlarges model folders, and {checkpoint} is none")
    return large_draft_model(checkpoint, Enlargement.read(target))


def _dtype_name(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _idle(plan: Plan, setting: _Setting, contestants: Sequence[Contestant], known: Mapping[str, Any]) -> set[str]:
    """Names of those that need not be started: they have answered everything, and are not to be calibrated."""
    done, there = answered(answers_of(plan.out)), {*known, *calibrated(plan.out)}

    def to_calibrate(contestant: Contestant) -> bool:
        whom = "transformers" if plan.options.batch > 1 else contestant.name
        return plan.calibrate and contestant.name.startswith("peer:") and whom not in there

    return {
        contestant.name
        for contestant in contestants
        if has_answered(contestant.name, setting.groups, plan.options.repeats, done) and not to_calibrate(contestant)
    }


def _open(contestants: Sequence[Contestant], watch: Watch) -> dict[str, str]:
    """Open everyone; why those that cannot take part cannot. A drafter of ours that cannot is the caller's to mend."""
    unavailable = {}
    for contestant in contestants:
        watch.say(f"starting {contestant.name}")
        try:
            contestant.open()
        except PacelineError as error:
            if isinstance(contestant, Ours):
                raise
            unavailable[contestant.name] = " ".join(str(error).split()).removeprefix(f"{contestant.name}: ")
    return unavailable


def _identity(plan: Plan, setting: _Setting, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """The part of run.json that makes it this run and no other."""
    suite = setting.suite
    return {
        "model": plan.model,
        "fingerprint": setting.target.weights_fingerprint,
        "as_large": setting.enlarged,
        "suite": {
            "name": suite.name,
            "source": suite.source,
            "fingerprint": suite.fingerprint,
            "questions": sum(len(group.questions) for group in setting.groups),
        },
        "options": {
            **asdict(plan.options),
            "limit": plan.limit,
            "categories": list(plan.categories),
            "template": plan.template,
            "methods": [contestant.name for contestant in contestants],
        },
        "machine": machine(environment(dtype=_dtype_name(setting.target), device=str(setting.target.device))),
    }


def _describe(
    plan: Plan, setting: _Setting, contestants: Sequence[Contestant], unavailable: dict[str, str]
) -> dict[str, Any]:
    """The rest of run.json: what explains the figures."""
    name = setting.target.name if plan.as_large is None else f"{Path(plan.model).name} as large as {plan.as_large}"
    return {
        "model_name": name,
        "environment": environment(dtype=_dtype_name(setting.target), device=str(setting.target.device)),
        "left_out": [asdict(question) for question in setting.left_out],
        "methods": [{**told, "unavailable": unavailable.get(told["method"])} for told in _methods(contestants)],
    }


def _methods(contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """What run.json says of methods that take part."""
    return [
        {
            "method": contestant.name,
            "settings": contestant.settings,
            "draft_bytes": contestant.draft_bytes,
            "target_bytes": contestant.target_bytes,
            "lossless": contestant.lossless,
            "unavailable": None,
        }
        for contestant in contestants
    ]


# The run ----------------------------------------------------------------------------------------------------------


def _run(
    plan: Plan,
    setting: _Setting,
    folder: RunFolder,
    present: Sequence[Contestant],
    calibrations: Calibrations | None,
    watch: Watch,
) -> bool:
    questions = sum(len(group.questions) for group in setting.groups)
    watch.total(len(present) * questions * plan.options.repeats)
    ends = tuple(setting.target.eos_token_ids)
    runner = Runner(
        folder,
        present,
        setting.groups,
        plan.options,
        prompt=setting.transcriber.prompt,
        recount=lambda text: max(len(setting.tokenizer.encode(text)) - 1, 0) if text else 0,
        ends=ends,
        device=setting.target.device,
        stopped=watch.stopped,
        progress=watch.answered,
        between=lambda share: calibrations.during(share, watch.stopped) if calibrations else None,
    )
    return runner.run()


# What it says -----------------------------------------------------------------------------------------------------


def _close(
    plan: Plan,
    setting: _Setting,
    folder: RunFolder,
    unavailable: dict[str, str],
    calibrations: dict[str, Calibration],
    complete: bool,
    watch: Watch,
) -> Outcome:
    """Work out the figures of all answers there are and write the files that others read."""
    answers = settled(folder.answers)
    judged = _judge(plan, setting, answers, folder.read(SUMMARY) or {}, watch)
    predicted = predict_run(answers, calibrations) if calibrations else {}
    facts = {told["method"]: told for told in (folder.read(RUN) or {}).get("methods", [])}
    results = summarize(answers, facts, judged=judged, predicted=predicted)
    disturbed = disturbances(answers, results, threads=torch.get_num_threads())
    summary = {
        "complete": complete,
        "disturbed": disturbed,
        "results": results,
        "predictions": {"devices": _elsewhere(setting, answers, plan)},
    }
    folder.write(SUMMARY, summary)
    notes = specbench.export(
        answers,
        folder.path / "spec-bench",
        model=Path(plan.model).name or plan.model,
        dtype=_dtype_name(setting.target),
        temperature=plan.options.temperature,
        suite=setting.suite,
    )
    return Outcome(folder.path, complete, results, unavailable, notes, disturbed)


def _elsewhere(setting: _Setting, answers: Sequence[Answer], plan: Plan) -> dict[str, dict[str, list[float]]]:
    """{device: {method: [low, speed-up, high]}} for this model on machines that are not here; our drafters alone."""
    config = read_config(setting.folder)
    if unsupported(config):
        return {}
    size = Size.of(config, setting.target.dtype.itemsize, setting.target.dtype.itemsize)
    context = int(np.mean([t.prompt_tokens + len(t.tokens) / 2 for a in answers for t in a.turns] or [0]))
    told: dict[str, dict[str, list[float]]] = {name: {} for name in DEVICES}
    for method in dict.fromkeys(answer.method for answer in answers):
        rounds = recorded_rounds(answer for answer in answers if answer.method == method)
        if method == "none" or method.startswith("peer:") or rounds is None:
            continue
        for name, device in DEVICES.items():
            found = predict(rounds, size, Machine(device), batch=plan.options.batch, context=context)
            told[name][method] = [found.low, found.speedup, found.high]
    return told


class _Differing(NamedTuple):
    """An answer and plain decoding's, and the turn and token at which they first differ."""

    answer: Answer
    plain: Answer
    turn: int
    at: int

    @property
    def facts(self) -> dict[str, Any]:
        """What is written down of it, beside a verdict."""
        return {
            "method": self.answer.method,
            "task": self.answer.task,
            "question": self.answer.question,
            "repeat": self.answer.repeat,
            "turn": self.turn,
            "at": self.at,
        }


def _differing(answers: Sequence[Answer]) -> list[_Differing]:
    """By question, and of one text the shorter common beginnings first: what a text begins with is then read once."""
    plain = {(a.repeat, a.question): a for a in answers if a.method == BASELINE and a.failed is None}
    found = []
    for answer in answers:
        other = plain.get((answer.repeat, answer.question))
        if answer.method == BASELINE or answer.failed is not None or other is None:
            continue
        if where := first_divergence(answer, other):
            found.append(_Differing(answer, other, *where))
    return sorted(found, key=lambda one: (one.answer.question, one.answer.repeat, one.turn, one.at))


def _judge(
    plan: Plan, setting: _Setting, answers: Sequence[Answer], before: Mapping[str, Any], watch: Watch
) -> list[dict[str, Any]]:
    """Where answers leave plain decoding's, and whether that is a tie or a bug; sampled ones cannot be judged. Of a
    large model it takes seconds each: of every method JUDGED are, and none any more once the run is stopped.

    before  the summary that the folder has, whose verdicts are taken."""
    found = _differing(answers)
    if plan.options.temperature:
        return [one.facts | _unjudged("sampled") for one in found]
    by_method: dict[str, list[_Differing]] = {}
    for one in found:
        by_method.setdefault(one.answer.method, []).append(one)
    known = _verdicts(before)
    chosen = {_key(one.facts) for of_method in by_method.values() for one in of_method[:JUDGED]}
    left = chosen - known.keys()
    told, judge, judged = [], None, 0
    with ExitStack() as stack:
        for one in found:
            key = _key(one.facts)
            said = known.get(key, _unjudged("not judged"))
            if key in left and not watch.stopped():
                judge = judge or stack.enter_context(_judge_of(plan, setting, watch))
                said = _verdict(judge, setting, one)
                judged += 1
                watch.judged(judged, len(left))
            told.append(one.facts | said)
    return told


def _verdicts(summary: Mapping[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Those of a summary, by `_key`."""
    differing = [one for result in summary.get("results", []) for one in result["differs"]]
    return {
        _key(one): {name: one[name] for name in _unjudged("")} for one in differing if one["verdict"] in ("tie", "bug")
    }


def _key(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(facts[name] for name in ("method", "question", "repeat", "turn", "at"))


def _unjudged(verdict: str) -> dict[str, Any]:
    return {"verdict": verdict, "gap": None, "noise": None}


def _judge_of(plan: Plan, setting: _Setting, watch: Watch) -> Judge:
    exact = setting.target
    watch.say("comparing differing answers with the model in float32")
    if exact.dtype != torch.float32:
        exact = load(setting.folder, dtype="float32", device=plan.device)
    return Judge(setting.target, exact)


def _verdict(judge: Judge, setting: _Setting, one: _Differing) -> dict[str, Any]:
    """Of the first token that differs. An answer that merely ends sooner or later than it must is a bug."""
    mine, others = one.answer.turns[one.turn].tokens, one.plain.turns[one.turn].tokens
    if one.at >= min(len(mine), len(others)):
        return _unjudged("bug")
    messages: list[dict[str, str]] = []
    for n in range(one.turn + 1):
        messages.append({"role": "user", "content": setting.question(one.answer.question).turns[n]})
        if n < one.turn:
            messages.append({"role": "assistant", "content": one.plain.turns[n].text})
    prefix = [*setting.transcriber.prompt(messages), *others[: one.at]]
    return asdict(judge.verdict(prefix, others[one.at], mine[one.at]))
