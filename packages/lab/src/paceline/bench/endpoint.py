"""Running servers under load: `paceline bench server URL...`.

    bench_endpoints(Benchmark(suite="log.jsonl", load=Load("http://a:8000/v1,http://b:8000/v1", concurrency=8)))

The workload, a log or a suite's first turns, is cut into windows. Every server answers a window before the next
begins, in random order, so that all meet the same changes. Within a window a fixed number of requests is under way, or
requests are sent at the log's times. Answers, figures, folder and page are as in every benchmark."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

from paceline.bench.metrics import OVERALL, summarize
from paceline.bench.options import Benchmark, Load, Result
from paceline.bench.record import KIND, SUMMARY, settled
from paceline.bench.runner import QuestionGroup, answer_all
from paceline.bench.suites import ALL, SUITES, Question, read_suite, tasks_in_turn
from paceline.errors import PacelineError
from paceline.logs.conversations import Reading
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Body, completed
from paceline.net.servers import Drafting, Request, Senders, Server, fingerprint, read_requests
from paceline.runs.environment import environment
from paceline.runs.progress import Progress
from paceline.runs.runs import Run

WINDOW = 8  # Requests of a window for each request under way.
FEWEST, MOST = 16, 256  # Bounds of a window's requests.
BUSY = 0.7  # With a larger share of a core, the client may be slower than the server.


class Loaded(Server):
    """A running server under a load. A request that fails is an answer without a text.

    load, senders  how much to ask at once, and the processes that ask; set before `ask`.
    busiest        largest share of a core that a sending process used in a window."""

    load: Load
    senders: Senders
    busiest = 0.0

    def ask(self, bodies: Sequence[Body], slots: int | None = None) -> list[Completion]:
        """Ask as `Endpoint.ask`. "at" in a request is its time in the log, in seconds."""
        due = None
        if self.load.arrivals is not None:
            due = [(one["at"] - bodies[0]["at"]) / self.load.arrivals for one in bodies]
        sent = [{**self.streaming, **{name: given for name, given in one.items() if name != "at"}} for one in bodies]
        before, began = self.drafting(), perf_counter()
        answers, busy = self.senders.send(self, sent, self.load.most, due, self.over)
        seconds, after = perf_counter() - began, self.drafting()
        self.busiest = max(self.busiest, busy)
        done = completed(answers, seconds)
        if all(isinstance(one, CompletionError) for one in answers):
            raise PacelineError(str(answers[0]))
        for one in done:
            one.text = one.reasoning + one.text
        new = Drafting.of_answers(answers) or (after.since(before) if before and after else None)
        done[0].batch = {} if new is None else new.counts()
        return done


def bench_endpoints(benchmark: Benchmark, progress: Progress = Progress()) -> Result:
    """Run, or continue, the benchmark of running servers in `benchmark.out`.

    Raises PacelineError for wrong options, before anything is timed."""
    load, options = benchmark.load, benchmark.options
    reading = Reading()
    requests = {one.id: one for one in workload(benchmark, reading)}
    servers = [Loaded.find(spec.strip(), benchmark.keys) for spec in (load.server or "").split(",")]
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
        for name, one in named.items():
            one.name, one.load, one.senders, one.over = name, load, senders, progress.stopped
            one.facts["goals"] = load.goals
        return _run(benchmark, progress, servers, requests, reading, identity, seen)


def _run(
    benchmark: Benchmark, progress: Progress, servers: Sequence[Loaded], requests: Mapping[str, Request],
    reading: Reading, identity: dict[str, Any], seen: dict[str, Any],
) -> Result:  # fmt: skip
    load, options = benchmark.load, benchmark.options
    methods = [
        {"method": one.name, "settings": one.facts, "baseline": one is servers[0], "unavailable": None}
        for one in servers
    ]
    with Run.open(benchmark.out, KIND, identity, environment=seen, methods=methods) as run:
        complete, answers = answer_all(
            run,
            progress,
            endpoints=servers,
            groups=windows(list(requests), load.most),
            options=options,
            request=lambda question, _: _body(requests[question.id]),
        )
        results = summarize(settled(answers), {str(of["method"]): of for of in methods})
        shares = {one.name: round(one.busiest, 3) for one in servers if one.busiest}
        notes = [*reading.notes(), *_compared(results, load), *_client(shares)]
        facts = {"complete": complete, "disturbed": [], "results": results, "notes": notes, "client_cpu": shares}
        run.write(SUMMARY, facts)
    return Result(run.path, complete, results, notes)


def _body(one: Request) -> Body:
    """A request's body with its time, and at most as many tokens as the log's answer had."""
    return {**one.body(), "at": one.at} | ({"max_tokens": one.length} if one.length else {})


def workload(benchmark: Benchmark, reading: Reading) -> list[Request]:
    """The requests: first turns of a suite, or the prompt of every answer in a log, in order of arrival if that
    matters. Raises PacelineError if there are none. reading: counts the skipped lines of a log."""
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
    """Cut the requests into windows. All servers answer a window before the next."""
    size = min(max(WINDOW * at_once, FEWEST), MOST)
    questions = [Question(id, ALL, ALL, ("",)) for id in ids]
    parts = [tuple(questions[begin : begin + size]) for begin in range(0, len(questions), size)]
    return [QuestionGroup(number, part, (1,) * len(part)) for number, part in enumerate(parts)]


def _drafts(name: str, counts: Mapping[str, Any]) -> str:
    """A server's own counts of drafts, in a sentence."""
    by = "".join(f"; {who} {of['accepted']} of {of['drafted']}" for who, of in counts["by_drafter"].items())
    drafts = f"{counts['rounds']} drafts{by}"
    return f"{name}: {counts['accepted']} of {counts['drafted']} drafted tokens accepted in {drafts}."


def _client(shares: Mapping[str, float]) -> list[str]:
    """A warning if the client may have been slower than the server."""
    worst = max(shares.values(), default=0.0)
    if worst <= BUSY:
        return []
    what = f"A process used {worst:.0%} of a core while it asked, so figures may be its own and not the server's"
    return [f"{what}: ask with more --processes, from another machine, or with a smaller --batch."]


def _compared(results: Sequence[dict[str, Any]], load: Load) -> list[str]:
    """Sentences on how far the comparison of servers can be trusted."""
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
