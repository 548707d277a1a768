"""A benchmark from its options to its figures: `bench(Benchmark(...))` is what `paceline bench` does.

Loads the model and the questions, lets the runner ask every endpoint, judges answers that differ from plain decoding's,
works out the figures and writes the files."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.bench import specbench
from paceline.bench.checks import disturbances, judge_differences
from paceline.bench.metrics import BASELINE, summarize
from paceline.bench.options import Benchmark, Result
from paceline.bench.ours import Ours, scheduled_engines
from paceline.bench.record import ANSWERS, KIND, SUMMARY, Answer, answered, read_answers, settled
from paceline.bench.runner import answer_all, has_answered
from paceline.bench.setting import Setting, set_up
from paceline.draft.registry import create
from paceline.errors import PacelineError
from paceline.formats.folder import tuned_note
from paceline.net.endpoint import Endpoint
from paceline.peers import create_peer, parse_peer
from paceline.runs.environment import machine
from paceline.runs.progress import Progress
from paceline.runs.runs import RUN, Run, check


def bench(benchmark: Benchmark, progress: Progress = Progress()) -> Result:
    """Run, or continue, the benchmark in `benchmark.out`.

    Raises PacelineError for wrong options, before anything is timed."""
    # Wrong options of specs are refused before a large model is read, another run's folder before an engine starts.
    for spec in benchmark.drafts:
        create(spec)
    for spec in benchmark.peers:
        parse_peer(spec)
    setting = set_up(benchmark)
    endpoints = create_endpoints(setting)
    described = identity(setting, endpoints)
    check(benchmark.out, KIND, described)
    finished = _finished(setting, endpoints)
    try:
        unavailable = open_endpoints([c for c in endpoints if c.name not in finished], progress)
        present = [endpoint for endpoint in endpoints if endpoint.name not in unavailable]
        opened = [endpoint for endpoint in present if endpoint.name not in finished]
        about = description(setting, endpoints, unavailable)
        with Run.open(benchmark.out, KIND, described, **about) as run:
            _describe(run, opened)  # A peer may have been installed since the run began.
            complete, answers = _run(setting, run, present, progress)
            _describe(run, opened)  # A draft model's size may be a mean over its forwards.
            _close_all(endpoints)  # Judging may load the model once more, in float32.
            return _conclude(setting, run, answers, unavailable, complete, progress)
    finally:
        _close_all(endpoints)


def create_endpoints(setting: Setting) -> list[Endpoint]:
    """Make the endpoints, unopened: plain decoding, our drafters, then the peers."""
    benchmark, target, tokenizer = setting.benchmark, setting.target, setting.tokenizer
    drafts = list(dict.fromkeys([BASELINE, *benchmark.drafts]))
    if benchmark.schedules:
        schedules, batches, budget = benchmark.schedules, benchmark.batches, benchmark.budget
        return list(scheduled_engines(drafts, schedules, batches, target, tokenizer, budget))
    ours = [Ours(spec, target, tokenizer, batch=benchmark.options.batch, budget=benchmark.budget) for spec in drafts]
    return [*ours, *(_peer(spec, setting) for spec in dict.fromkeys(benchmark.peers))]


def _peer(spec: str, setting: Setting) -> Endpoint:
    return create_peer(
        spec,
        str(setting.folder),
        dtype=setting.dtype,
        threads=torch.get_num_threads(),
        python=setting.benchmark.peer_python,
        batch=setting.benchmark.options.batch,
        max_context=setting.peer_context,
        tokenizer=setting.tokenizer,
        device=str(setting.target.device),
    )


def open_endpoints(endpoints: Sequence[Endpoint], progress: Progress) -> dict[str, str]:
    """Open all endpoints. Returns why peers cannot take part, by name;
    raises PacelineError if a drafter of ours cannot."""
    unavailable = {}
    for endpoint in endpoints:
        progress.say(f"starting {endpoint.name}")
        try:
            endpoint.open()
        except PacelineError as error:
            if isinstance(endpoint, Ours):
                raise
            unavailable[endpoint.name] = " ".join(str(error).split()).removeprefix(f"{endpoint.name}: ")
    return unavailable


def _finished(setting: Setting, endpoints: Sequence[Endpoint]) -> set[str]:
    """Names of the endpoints that have answered everything, and need no start."""
    done = answered(read_answers(setting.benchmark.out / ANSWERS))
    repeats = setting.benchmark.options.repeats
    return {c.name for c in endpoints if has_answered(c.name, setting.groups, repeats, done)}


def _close_all(endpoints: list[Endpoint]) -> None:
    """Close all endpoints that are still open."""
    while endpoints:
        endpoints.pop().close()


def identity(setting: Setting, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The facts that a run must share with its folder to go on with it."""
    benchmark, suite = setting.benchmark, setting.suite
    contest = {"schedules": list(benchmark.schedules), "batches": list(benchmark.batches)}
    asked = {"name": suite.name, "source": suite.source, "fingerprint": suite.fingerprint}
    return {
        "model": benchmark.model,
        "fingerprint": setting.target.weights_fingerprint,
        **({"weights": setting.target.expanded} if setting.target.expanded else {}),
        **({"activations": setting.target.activations} if setting.target.activations else {}),
        "suite": asked | {"questions": setting.num_questions},
        "options": {
            **asdict(benchmark.options),
            "limit": benchmark.limit,
            "categories": list(benchmark.categories),
            "template": benchmark.template,
            **(contest if benchmark.schedules else {}),
            **({"exact": True} if benchmark.exact else {}),
            **({} if benchmark.budget else {"budget": False}),
            "methods": [endpoint.name for endpoint in endpoints],
        },
        "machine": machine(setting.environment()),
    }


def description(setting: Setting, endpoints: Sequence[Endpoint], unavailable: dict[str, str]) -> dict[str, Any]:
    """The rest of run.json: facts that explain the figures."""
    return {
        "model_name": setting.target.name,
        "tuned": tuned_note(setting.benchmark.model),
        "quantised": " ".join(setting.target.notes) or None,
        "environment": setting.environment(),
        "left_out": [asdict(question) for question in setting.left_out],
        "methods": [facts | {"unavailable": unavailable.get(facts["method"])} for facts in _methods(endpoints)],
    }


def _methods(endpoints: Sequence[Endpoint]) -> list[dict[str, Any]]:
    """Entries of run.json for methods that take part."""
    facts = ("draft_bytes", "target_bytes", "lossless")
    return [
        {"method": endpoint.name, "settings": endpoint.facts, **{fact: getattr(endpoint, fact) for fact in facts},
         "unavailable": None}
        for endpoint in endpoints
    ]


def _describe(run: Run, endpoints: Sequence[Endpoint]) -> None:
    """Add facts of methods to run.json that were unknown when the run began."""
    now = {one["method"]: one for one in _methods(endpoints)}
    run.update(methods=[now.get(one["method"], one) for one in (run.read(RUN) or {})["methods"]])


def _run(setting: Setting, run: Run, present: Sequence[Endpoint], progress: Progress) -> tuple[bool, list[Answer]]:
    """Answer all questions. Returns whether everything is answered, and all answers."""
    encode = setting.tokenizer.encode
    return answer_all(
        run,
        progress,
        endpoints=present,
        groups=setting.groups,
        options=setting.benchmark.options,
        request=setting.request,
        recount=lambda text: max(len(encode(text)) - 1, 0) if text else 0,
        gpu=setting.target.device if setting.target.device.type == "cuda" else None,
    )


def _conclude(
    setting: Setting, run: Run, answers: list[Answer], unavailable: dict[str, str], complete: bool, progress: Progress
) -> Result:
    """Work out the figures of all answers so far, and write the files."""
    benchmark, answers = setting.benchmark, settled(answers)
    judged = judge_differences(setting, answers, run.read(SUMMARY) or {}, progress)
    facts = {entry["method"]: entry for entry in (run.read(RUN) or {}).get("methods", [])}
    figures = summarize(answers, facts, judged=judged)
    compares = bool(benchmark.schedules)  # A larger batch may be faster than its drafts alone allow.
    disturbed = disturbances(answers, [] if compares else figures, threads=torch.get_num_threads())
    run.write(SUMMARY, {"complete": complete, "disturbed": disturbed, "results": figures})
    notes: list[str] = []
    if not compares:
        model, temperature = Path(benchmark.model).name or benchmark.model, benchmark.options.temperature
        about: dict[str, Any] = {"model": model, "dtype": setting.dtype, "temperature": temperature}
        notes = specbench.export(answers, benchmark.out / "spec-bench", suite=setting.suite, **about)
    return Result(run.path, complete, figures, notes, unavailable, disturbed)
