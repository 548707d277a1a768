"""Counters of requests for Prometheus and, if asked for, a log of every prompt and answer.

Counters are named after our prefix or, with --metrics-prefix vllm, as vLLM names them. The log is JSON Lines that
`paceline replay` reads as they are, a line for each answer. It holds the token ids of prompts and answers, so
everything that users wrote and got."""

import logging
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from threading import Lock
from time import perf_counter, time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline.core.request import Delta
from paceline.outputs import REQUESTS, Appender
from paceline.serve.said import serving
from paceline.serve.worker import Job, Worker

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)
"""Limits of the buckets of times."""
SHARES = tuple(tenth / 10 for tenth in range(11))
"""Limits of the buckets of shares."""


class Metrics:
    """Counters of one worker."""

    def __init__(self, worker: Worker, prefix: str = "paceline"):
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"{prefix}:{name}", what, labels, registry=self.registry)

        def histogram(name: str, what: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(f"{prefix}:{name}", what, buckets=buckets, registry=self.registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"{prefix}:{name}", what, registry=self.registry)

        self._worker = worker
        gauge("num_requests_running", "Requests in the batch").set_function(lambda: worker.running)
        gauge("num_requests_waiting", "Requests that wait").set_function(lambda: worker.waiting)
        self.prompt = counter("prompt_tokens", "Tokens of prompts")
        self.new = counter("generation_tokens", "Tokens of answers")
        self.ended = counter("request_success", "Requests by how they ended", ["finished_reason"])
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token")
        self.between = histogram("inter_token_latency_seconds", "Time of a round by its tokens")
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end")
        self.drafts = counter("spec_decode_num_drafts", "Rounds with a draft")
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self.by_place = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft", ["position"]
        )
        what = "Tokens of requests that have ended, by drafter"
        self.by_drafter_drafted = counter("spec_decode_drafter_draft_tokens", f"{what}: drafted", ["drafter"])
        self.by_drafter_accepted = counter("spec_decode_drafter_accepted_tokens", f"{what}: accepted", ["drafter"])
        what = "Share of a request's drafted tokens that was accepted"
        self.of_request = histogram("spec_decode_request_acceptance_rate", what, SHARES)
        ahead = {"read": "read ahead", "used": "read ahead that a later prompt had", "wasted": "read ahead in vain"}
        for name, what in ahead.items():
            now = attrgetter(f"ahead.{name}")
            gauge(f"read_ahead_{name}_tokens", f"Tokens {what}").set_function(partial(now, worker))
        self.warnings = counter("warnings", "Warnings and errors, by what warned", ["kind"])
        self.by_drafter: Counts[str] = Counts()
        self._last: dict[int, float] = {}
        self._jobs = worker.jobs
        worker.on_round, worker.on_end = self.round, self.end

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which warnings are counted."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warnings.labels(record.name.removeprefix("paceline.")).inc()  # type: ignore[method-assign]
        logs = logging.getLogger("paceline"), logging.getLogger("uvicorn")
        for log in logs:
            log.addHandler(handler)
        try:
            yield
        finally:
            for log in logs:
                log.removeHandler(handler)

    def round(self, deltas: list[Delta]) -> None:
        """Count a round. Runs in the engine's thread. A counter costs microseconds, so each is changed once."""
        now = perf_counter()
        spoken = [delta for delta in deltas if delta.tokens and delta.row.id in self._jobs]
        for delta in spoken:
            last = self._last.get(delta.row.id)
            if last is None:
                self.first.observe(now - self._jobs[delta.row.id].arrived)
            else:
                self.between.observe((now - last) / len(delta.tokens))
            self._last[delta.row.id] = now
        self.new.inc(sum(len(delta.tokens) for delta in spoken))
        drafted = [delta for delta in spoken if delta.nodes]
        if not drafted:
            return
        self.drafts.inc(len(drafted))
        self.drafted.inc(sum(delta.nodes for delta in drafted))
        accepted = [delta.accepted for delta in drafted]
        self.accepted.inc(sum(accepted))
        for place in range(max(accepted)):
            self.by_place.labels(str(place)).inc(sum(depth > place for depth in accepted))
        for source, text in (piece for delta in drafted for piece in delta.pieces):
            if source:
                self.by_drafter[source] += len(text)

    def end(self, job: Job) -> None:
        """Count a request that has ended. Runs in the engine's thread."""
        assert job.row is not None
        self._last.pop(job.row.id, None)
        self.prompt.inc(job.row.prompt_length)
        self.ended.labels(job.row.finish_reason or "abort").inc()
        self.whole.observe(perf_counter() - job.arrived)
        stats, row = job.row.stats, job.row
        serving.info(
            "%d tokens of prompt, %d of answer in %d rounds (%.2f a round), %d of %d drafted accepted, %.2f s: %s",
            row.prompt_length, row.num_new, stats.rounds, stats.mean_accepted_tokens, stats.accepted_tokens,
            stats.draft_tokens, perf_counter() - job.arrived, row.finish_reason or "abort",
        )  # fmt: skip
        for name, (drafted, accepted) in stats.drafters.items():
            self.by_drafter_drafted.labels(name).inc(drafted)
            self.by_drafter_accepted.labels(name).inc(accepted)
        if stats.draft_tokens:
            self.of_request.observe(stats.acceptance_rate)

    def now(self) -> dict[str, Any]:
        """Sums for the page."""
        return {
            "running": self._worker.running,
            "waiting": self._worker.waiting,
            "tokens": self._sum(self.new),
            "drafts_made": self._sum(self.drafts),
            "accepted": self._sum(self.accepted),
            "characters_by_drafter": dict(self.by_drafter),
        }

    @staticmethod
    def _sum(counter: Counter) -> float:
        return float(next(iter(counter.collect())).samples[0].value)

    def text(self) -> bytes:
        """All counters in Prometheus' text format, for /metrics."""
        return generate_latest(self.registry)


class RequestLog:
    """The log, which only its owner may read. Lines are written in one piece. If the file was renamed or removed, as by
    logrotate, a new one is begun."""

    def __init__(self, file: Path):
        self._file, self._lines = file, Appender.open(file, REQUESTS, private=True)
        self._lock = Lock()

    def write(self, job: Job) -> None:
        """Append an answer."""
        done = job.completion
        record = {
            "time": round(time(), 3),
            "prompt_tokens": job.row.tokens[: job.row.prompt_length].tolist() if job.row else job.prompt,
            "tokens": done.tokens,
            "finish_reason": done.finish_reason,
            "seconds": round(done.seconds, 4),
            "rounds": done.rounds,
            "drafted": done.stats.draft_tokens,
            "accepted": done.stats.accepted_tokens,
            "by_drafter": {name: list(counts) for name, counts in done.stats.drafters.items()},
            "temperature": job.params.temperature,
            "seed": done.seed,
        }
        with self._lock:
            if not self._lines.is_at(self._file):
                before, self._lines = self._lines, Appender.open(self._file, REQUESTS, private=True)
                before.close()
            self._lines.append([record])

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
