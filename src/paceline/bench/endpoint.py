"""Running servers under load: `paceline bench server URL...`.

    bench_endpoints(Benchmark(suite="log.jsonl", load=Load("http://a:8000/v1,http://b:8000/v1", concurrency=8)))

The workload, a log or a suite's first turns, is cut into windows. Every server answers a window before the next one
begins, in an order that is drawn anew, so that whatever changes meanwhile changes for both. Within a window requests
are sent so many at once, or at the times of the log. Answers, figures, folder and page are those of every benchmark."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

from paceline.bench.benchmark import Result, answer_all
from paceline.bench.metrics import OVERALL, summarize
from paceline.bench.options import Benchmark, Load
from paceline.bench.record import KIND, SUMMARY, settled
from paceline.bench.runner import QuestionGroup, Stopped
from paceline.bench.setting import Watch
from paceline.bench.suites import ALL, SUITES, Question, read_suite, tasks_in_turn
from paceline.errors import PacelineError
from paceline.logs.conversations import Reading
from paceline.net.client import Completion
from paceline.net.servers import Drafting, Request, Senders, Server, fingerprint, read_requests
from paceline.peers.contestant import Ask, Contestant, Reply
from paceline.runs.environment import environment
from paceline.runs.runs import Run

WINDOW = 8  # requests of a window for each that is under way at once
FEWEST, MOST = 16, 256  # requests of a window
BUSY = 0.7  # share of a core above which the client may be slower than the server


class Endpoint(Contestant):
    """A running server. Its prompts are requests."""

    def __init__(self, name: str, server: Server, load: Load, watch: Watch, senders: Senders):
        settings = {name: getattr(server, name) for name in ("url", "model", "engine", "version")}
        super().__init__(name, settings=settings | {"goals": load.goals}, in_process=False)
        self.server, self.load, self.watch, self.senders = server, load, watch, senders
        self.busiest = 0.0  # share of a core that a process used while it asked, in the window where it was largest

    def wake(self, seconds: float) -> None:
        """Nothing: the server runs anyway."""

    def answer(self, prompts: Sequence[Any], ask: Ask) -> list[Reply]:
        bodies, due = [], None
        for one, seed in zip(prompts, ask.seeds, strict=True):
            sampled = {"temperature": ask.temperature, "seed": seed} if ask.temperature else {}
            bodies.append(self.server.body(one, min(ask.max_tokens, one.length or ask.max_tokens), **sampled))
        if self.load.arrivals is not None:
            due = [(one.at - prompts[0].at) / self.load.arrivals for one in prompts]
        before, began = self.server.drafting(), perf_counter()
        answers, busy = self.senders.send(self.server, bodies, self.load.most, due, self.watch.stopped)
        seconds, after = perf_counter() - began, self.server.drafting()
        self.busiest = max(self.busiest, busy)
        if None in answers:
            raise Stopped
        if not any(isinstance(one, Completion) for one in answers):
            raise PacelineError(str(answers[0]))
        replies = [_reply(one, seconds) for one in answers]
        new = Drafting.of_answers(answers) or (after.since(before) if before and after else None)
        replies[0].batch = {} if new is None else new.counts()
        return replies


def _reply(answer: object, seconds: float) -> Reply:
    if not isinstance(answer, Completion):
        return Reply(0, [], "", seconds, finish="error")
    return Reply(
        prompt_tokens=answer.usage.get("prompt_tokens") or 0,
        tokens=answer.tokens,
        text=answer.reasoning + answer.text,
        seconds=seconds,
        times=answer.times or None,
        finish=answer.finish_reason,
        count=answer.usage.get("completion_tokens") or len(answer.times),
    )


def bench_endpoints(benchmark: Benchmark, watch: Watch = Watch()) -> Result:
    """Run, or continue, the benchmark of running servers in `benchmark.out`.

    Raises PacelineError for what the caller has to change, before anything is timed."""
    load, options = benchmark.load, benchmark.options
    reading = Reading()
    requests = {one.id: one for one in workload(benchmark, reading)}
    servers = [Server.find(spec.strip(), benchmark.keys) for spec in (load.server or "").split(",")]
    named = {one.name: one for one in servers}
    if len(named) < len(servers):
        named = {f"{one.name}#{one.model}": one for one in servers}
    if len(named) < len(servers):
        raise PacelineError(f"{servers[0].url} is named twice; give two servers, or one")
    digest = fingerprint([*requests.values()])
    identity = {
        "model": servers[0].model,
        "suite": {"name": benchmark.suite, "fingerprint": digest, "questions": len(requests)},
        "options": {**asdict(options), **asdict(load), "batch": load.most, "methods": list(named)},
    }
    seen = environment(dtype="of the servers", device="of the servers")
    with Senders(load.processes) as senders:
        contestants = [Endpoint(name, server, load, watch, senders) for name, server in named.items()]
        return _run(benchmark, watch, contestants, requests, reading, identity, seen)


def _run(
    benchmark: Benchmark, watch: Watch, contestants: Sequence[Endpoint], requests: Mapping[str, Request],
    reading: Reading, identity: dict[str, Any], seen: dict[str, Any],
) -> Result:  # fmt: skip
    load, options = benchmark.load, benchmark.options
    methods = [
        {"method": one.name, "settings": one.settings, "baseline": one is contestants[0], "unavailable": None}
        for one in contestants
    ]
    with Run.open(benchmark.out, KIND, identity, environment=seen, methods=methods) as run:
        watch.total(len(contestants) * len(requests) * options.repeats)
        complete, answers = answer_all(
            run,
            watch,
            contestants=contestants,
            groups=windows(list(requests), load.most),
            options=options,
            prompt=lambda question, _: requests[question.id],
        )
        results = summarize(settled(answers), {str(of["method"]): of for of in methods})
        shares = {one.name: round(one.busiest, 3) for one in contestants if one.busiest}
        notes = [*reading.notes(), *_compared(results, load), *_client(shares)]
        facts = {"complete": complete, "disturbed": [], "results": results, "notes": notes, "client_cpu": shares}
        run.write(SUMMARY, facts)
    return Result(run.path, complete, results, {}, notes, [])


def workload(benchmark: Benchmark, reading: Reading) -> list[Request]:
    """The requests: first turns of a suite, or every answer's prompt of a log; in their order of arrival where that is
    kept. Raises PacelineError. reading: counts the lines of a log that cannot be read, and are skipped."""
    if benchmark.suite in SUITES:
        questions = read_suite(benchmark.suite, limit=benchmark.limit, categories=benchmark.categories).questions
        mixed = tasks_in_turn(questions, lambda question: question.task)
        found = [Request(one.id, [{"role": "user", "content": one.turns[0]}]) for one in mixed]
    else:
        found = read_requests(benchmark.suite, benchmark.ignore or (), benchmark.limit, reading)
    if benchmark.load.arrivals is None:
        return found
    if absent := next((one.id for one in found if one.at is None), None):
        raise PacelineError(f"{benchmark.suite}: request {absent} does not say when it came; leave out --arrivals")
    return sorted(found, key=lambda one: one.at or 0.0)


def windows(ids: Sequence[str], at_once: int) -> list[QuestionGroup]:
    """The requests in windows, each of which all servers answer before the next one."""
    size = min(max(WINDOW * at_once, FEWEST), MOST)
    questions = [Question(id, ALL, ALL, ("",)) for id in ids]
    parts = [tuple(questions[begin : begin + size]) for begin in range(0, len(questions), size)]
    return [QuestionGroup(number, part, (1,) * len(part)) for number, part in enumerate(parts)]


def _drafts(name: str, counts: Mapping[str, Any]) -> str:
    """What a server says of its drafts, in a sentence."""
    by = "".join(f"; {who} {of['accepted']} of {of['drafted']}" for who, of in counts["by_drafter"].items())
    drafts = f"{counts['rounds']} drafts{by}"
    return f"{name}: {counts['accepted']} of {counts['drafted']} drafted tokens accepted in {drafts}."


def _client(shares: Mapping[str, float]) -> list[str]:
    """A warning where this process may have been what was measured."""
    worst = max(shares.values(), default=0.0)
    if worst <= BUSY:
        return []
    what = f"A process used {worst:.0%} of a core while it asked, so figures may be its own and not the server's"
    return [f"{what}: ask with more --processes, from another machine, or with a smaller --batch."]


def _compared(results: Sequence[dict[str, Any]], load: Load) -> list[str]:
    """How good the comparison of two servers is, in sentences."""
    first, *others = [result for result in results if result["category"] == OVERALL]
    notes = ["Requests came at the log's times, which decide the tokens a second."] * (load.arrivals is not None)
    for one in others:
        if one["speedup"] is None or one["identical"] is None:
            continue
        low, high = one["speedup_low"], one["speedup_high"]
        sure = "too few windows for an interval" if low is None else f"95 % interval {low:.2f} to {high:.2f}"
        doubt = "" if low is None or not low <= 1 <= high else ", which includes 1: no difference is shown"
        notes.append(
            f"{one['method']} has {one['speedup']:.2f} times the tokens a second of {first['method']} ({sure}{doubt}), "
            f"in turn on the same {one['compared']} requests; {one['identical']:.0%} of the answers are the same."
        )
    return notes + [_drafts(one["method"], one["server_drafts"]) for one in (first, *others) if one["server_drafts"]]
