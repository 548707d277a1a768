"""Shrink the requests of a finding while they show the bug, and report it."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.certify.asking import Fields, ended
from paceline.certify.scenarios import Case, Group, Play, Step, Wrong
from paceline.certify.verdict import LEVEL, Finding
from paceline.errors import PacelineError
from paceline.net.completion import Completion
from paceline.net.endpoint import Endpoint

SHRUNK = 3  # Most findings to shrink, each of another scenario.
REPEATS = 3  # The smallest requests are repeated so often.
Seen = tuple[str, float, float]


def greedy_reports(play: Play) -> list[Fields]:
    """Report the first bug of each scenario, for the first SHRUNK scenarios."""
    first = {one.scenario: one for one in reversed(play.bugs)}
    return [_report(play, one) for one in list(first.values())[::-1][:SHRUNK]]


class Shrinking:
    """Makes the requests of a finding fewer, shorter and plainer while they show a bug and there is time."""

    def __init__(self, play: Play, finding: Wrong):
        self.play, self.best = play, finding

    def run(self) -> Wrong:
        self._company()
        self._length()
        self._words()
        self._length()
        for name in sorted(self.best.case.body.keys() - {"messages", "max_tokens", "temperature", "seed"}):
            self._change({}, without=name)
        return self.best

    def shows(self, group: Group, *, always: bool = False) -> bool:
        """Ask whether these requests show a bug, and if so keep them as the best. always: ask even when time is up."""
        if self.play.watch.over(self.play.until) and not always:
            return False
        try:
            bugs = [one for one in self.play.play(group, self.best.scenario) if not one.divergence.is_tie]
        except PacelineError:  # The endpoint refuses such a request.
            return False
        self.best = bugs[0] if bugs else self.best
        return bool(bugs)

    def _company(self) -> None:
        """Try the request alone, twice in a row, after one of the earlier steps, and with fewer requests beside it."""
        *before, last = self.best.group
        alone, company = Step([self.best.case]), last.cases[:-1]
        tries: list[Group] = [[alone], [alone, alone], *([step, alone] for step in before)]
        fewer = [n for n in (1, 2, 4, 8, 16) if n < len(company)]
        tries += [[Step([*company[:n], self.best.case], n + 1)] for n in fewer]
        next((group for group in tries if self.shows(group)), None)

    def _length(self) -> None:
        """Cut max_tokens to the wrong token, or halve it while the bug shows."""
        if not self._change({"max_tokens": self.best.divergence.at + 1}):
            while (most := self.best.case.body["max_tokens"]) > 1:
                if not self._change({"max_tokens": most // 2}):
                    return

    def _words(self) -> None:
        """Leave out halves, quarters, ... of the last message's words while the bug shows."""
        *before, last = self.best.case.body["messages"]
        words = last["content"].split(" ")
        size = len(words) // 2
        while size:
            begin = 0
            while begin < len(words):
                fewer = [*words[:begin], *words[begin + size :]]
                if fewer and self._change({"messages": [*before, last | {"content": " ".join(fewer)}]}):
                    words = fewer
                else:
                    begin += size
            size //= 2

    def _change(self, fields: Fields, without: str = "") -> bool:
        """Whether a bug still shows if the wrong request has other fields, here and in earlier steps."""
        messages = self.best.case.body["messages"]

        def asked(body: Fields) -> Fields:
            return {key: value for key, value in body.items() if key != without} | fields

        def changed(case: Case) -> Case:
            if case.body["messages"] != messages:
                return case
            return replace(case, body=asked(case.body), plain=None if case.plain is None else asked(case.plain))

        return self.shows([Step(list(map(changed, step.cases)), step.slots) for step in self.best.group])


def _report(play: Play, found: Wrong) -> Fields:
    """Report the smallest requests that show the bug as printed, or the original ones if the smallest do not."""
    shown, small = 0, Shrinking(play, found).run()
    for one in (small, found):
        again = Shrinking(play, replace(one, group=_printed(one.group)))
        if shown := sum(again.shows(_printed(again.best.group), always=True) for _ in range(REPEATS)):
            break
    one = again.best
    sure = [f"the same requests show it {shown} times of {REPEATS}"]
    if not shown:
        sure.append("so it could not be shrunk: what came before, or beside it, may have a part in it")
    of, summary = one.divergence, _summary(one.answer, one.divergence.at)
    if of.gap is not None:
        sure.append(f"the two tokens are {of.gap:.3g} nats apart, and rounding moves them by {of.noise:.2g}")
    expected, observed = f"token {of.at} is {of.best!r}" if of.best else "an answer of which that is not so", summary[0]
    right = _right(play, one)
    for mine, theirs in zip(summary, summary if right is None else _summary(right, of.at), strict=True):
        if mine != theirs:
            expected, observed = f"as {play.control.name}: {json.dumps(theirs, ensure_ascii=False)}", mine
            break
    return {
        "scenario": one.scenario,
        "why": of.why or f"token {of.at} is {of.said!r}, and must be {of.best!r}",
        "curl": curl(play, one.group),
        "expected": expected,
        "observed": observed,
        "sure": "; ".join(sure),
    }


def _printed(group: Group) -> Group:
    """The group as `curl` runs it: the requests of a step all at once, or one after another."""
    return [Step(step.cases, len(step.cases) if step.slots > 1 else 1) for step in group]


def _right(play: Play, one: Wrong) -> Completion | None:
    """The control's right answer to the printed request; None if there is none."""
    body, control = one.case.body, play.control
    try:
        if not control.is_self:
            (right,) = control.expected([play.asked(body)])
            return None if any(play.wrong(one.case, right, one.right)) else right
        if one.right is None or one.case.plain is None:
            return None
        (right,) = control.expected([one.case.plain | {"max_tokens": body["max_tokens"]}])
    except PacelineError:
        return None
    return replace(right, text=until) if isinstance(until := ended(right, body), str) else right


def _summary(one: Completion, at: int) -> list[Any]:
    """An answer as the report shows it: text or texts, reason of its end, and token number `at`."""
    texts = [answer.text or json.dumps(answer.tool_calls) for answer in (one, *one.others)]
    reason = {"finish_reason": one.finish_reason, "completion_tokens": one.usage.get("completion_tokens")}
    token = one.logprobs[at] if at < len(one.logprobs) else {}
    return [texts if one.others else texts[0], reason, {key: token.get(key) for key in ("token", "logprob")}]


def sampled_report(
    server: Endpoint, body: Mapping[str, Any], number: int, found: Finding, seen: Sequence[Seen] = ()
) -> Fields:
    """Report a finding that no single answer shows, by `number` sampled requests with different seeds.

    seen: outcomes with their shares here and in the control; the eight furthest apart are shown."""
    far = sorted(seen, key=lambda row: -abs(row[1] - row[2]))[:8]
    return {
        "scenario": "sampled answers",
        "why": found.what,
        "curl": [f"for seed in $(seq {number}); do", line(server, body, seed="$seed"), "done"],
        "expected": {text: right for text, _, right in far} or "what the log-probabilities that it reports say",
        "observed": {text: share for text, share, _ in far} or found.what,
        "sure": f"p = {found.p:.1g}; a lossless engine is accused in {LEVEL:g} of all certificates",
    }


def curl(play: Play, group: Group) -> list[str]:
    """The shell commands of a group. Requests of a step run together."""
    out = []
    for step in group:
        together = len(step.cases) > 1 and step.slots > 1
        asked = [line(play.server, play.asked(case.body)) for case in step.cases]
        out += [*(f"{one} &" for one in asked), "wait"] if together else asked
    return out


def line(server: Endpoint, body: Mapping[str, Any], seed: str = "") -> str:
    """The shell command of a request. seed: a shell expression for the seed."""
    model = {"model": server.model} if server.model else {}
    data = shlex.quote(json.dumps({**model, **body}))
    if seed:
        data = f"""{data[:-2]}, "seed": '{seed}'}}'"""
    return f"curl -s {server.url}/chat/completions -H 'content-type: application/json' -d {data}"
