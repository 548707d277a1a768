"""Make the certificate of an endpoint: ask it part by part, and let an oracle judge the answers.

    certify(engine, Exact(model, None, recording, prompts, starts))    # judged by the exact logits of its model
    certify(server, Reported(control, prompts))                        # by log-probabilities and a control's answers"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

from paceline.certify import verdict
from paceline.certify.options import Scope
from paceline.certify.parts import Learnt, Oracle, Run
from paceline.certify.shrink import greedy_reports
from paceline.certify.verdict import LEVEL, LONG
from paceline.net.endpoint import Endpoint
from paceline.runs.progress import Progress

INTERRUPTED = "it was interrupted"
FOR_REPORTS = 0.15  # Least share of the budget for shrinking the requests of a finding.


def certify(endpoint: Endpoint, oracle: Oracle, scope: Scope = Scope(), watch: Progress = Progress()) -> dict[str, Any]:
    """Test `endpoint` and return the certificate. Each of the oracle's parts is asked until its share of the budget is
    spent."""
    run, learnt, parts = Run(endpoint, scope, watch), Learnt(), oracle.parts()
    if scope.is_bounded:
        watch.limit(scope.seconds)
    endpoint.over = watch.stopped
    for part in parts:
        # If nothing is sampled, scenarios also get the time of sampling.
        share = max(one.share for one in parts) if part.ends and scope.requests == 0 else part.share
        began = run.began if scope.is_bounded else perf_counter()
        learnt = part.ask(run, learnt, began + share * scope.seconds if scope.is_bounded or part.ends else inf)
    return _certificate(run, oracle, learnt)


def _certificate(run: Run, oracle: Oracle, learnt: Learnt) -> dict[str, Any]:
    scope, play, stopped = run.scope, learnt.play, run.watch.stopped()
    sampled, power = learnt.sampled.facts(), learnt.sampled.power(scope)
    if learnt.counts is not None:
        sampled = verdict.with_long(sampled, learnt.counts.facts(LEVEL * LONG), learnt.found)
    about = oracle.judged(run, learnt, sampled)
    not_tested = [*learnt.left_out, *about.pop("not_tested")]
    played: dict[str, Any] = {}
    if play is not None:
        # Findings are shrunk also after Ctrl-C.
        run.endpoint.over = play.control.source.over = lambda: False
        play.until = max(run.began + scope.seconds, perf_counter() + FOR_REPORTS * scope.seconds)
        not_tested += play.not_tested()
        reports = [] if learnt.two_models else [*greedy_reports(play), *oracle.reports(run, learnt, sampled)]
        played = {"scenarios": play.rows, "features": sorted(play.features), "reports": reports}
    return verdict.certificate(
        about.pop("greedy"), learnt.ended, sampled, power, replace(scope, shift=scope.shift or oracle.shift),
        **about, **played, not_tested=not_tested, two_models=learnt.two_models,
        broken=INTERRUPTED if stopped else run.broken,
        seconds=round(perf_counter() - run.began, 1),
    )  # fmt: skip
