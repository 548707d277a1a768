"""The smallest requests that still show a bug, and the report of it."""

import json
import shlex
from collections.abc import Sequence

from paceline.certify.asking import Fields
from paceline.certify.scenarios import Case, Group, Play, Step, Wrong
from paceline.certify.verdict import LEVEL, Finding
from paceline.errors import PacelineError
from paceline.workbench.endpoint import Endpoint

SHRUNK = 3  # findings that are made small, each of another scenario
REPEATS = 3  # how often the smallest requests are made once more
Seen = tuple[str, float, float]


def greedy_reports(play: Play) -> list[Fields]:
    """A report of the first bug of each scenario."""
    first = {one.scenario: one for one in reversed(play.bugs)}
    return [_report(play, Shrinking(play, one).run()) for one in list(first.values())[::-1][:SHRUNK]]


class Shrinking:
    """Makes the requests of a finding fewer, shorter and plainer, for as long as they show a bug and there is time."""

    def __init__(self, play: Play, finding: Wrong):
        self.play, self.best = play, finding

    def run(self) -> Wrong:
        self._company()
        self._length()
        self._words()
        self._length()
        for name in sorted(self.best.case.body.keys() - {"messages", "max_tokens", "temperature"}):
            self._change({}, without=name)
        return self.best

    def shows(self, group: Group, *, always: bool = False) -> bool:
        """Whether these requests show a bug; if so they are the best so far. always: also when the time is up."""
        if self.play.watch.over(self.play.until) and not always:
            return False
        try:
            bugs = [one for one in self.play.play(group, self.best.scenario) if not one.divergence.is_tie]
        except PacelineError:  # a request that the endpoint refuses
            return False
        self.best = bugs[0] if bugs else self.best
        return bool(bugs)

    def _company(self) -> None:
        """Alone, twice in a row, after one of the steps before, and with fewer other requests at once."""
        *before, last = self.best.group
        alone, company = Step([self.best.case]), last.cases[:-1]
        tries: list[Group] = [[alone], [alone, alone], *([step, alone] for step in before)]
        fewer = [n for n in (1, 2, 4, 8, 16) if n < len(company)]
        tries += [[Step([*company[:n], self.best.case], n + 1)] for n in fewer]
        next((group for group in tries if self.shows(group)), None)

    def _length(self) -> None:
        """To the wrong token, or by halves."""
        if not self._change({"max_tokens": self.best.divergence.at + 1}):
            while (most := self.best.case.body["max_tokens"]) > 1:
                if not self._change({"max_tokens": most // 2}):
                    return

    def _words(self) -> None:
        """The words of the last message without halves, quarters, ... of them, as long as that works."""
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
        """Whether a bug still shows when the wrong request, and where it comes before, is asked with other fields."""
        messages = self.best.case.body["messages"]

        def asked(body: Fields) -> Fields:
            return {key: value for key, value in body.items() if key != without} | fields

        def changed(case: Case) -> Case:
            if case.body["messages"] != messages:
                return case
            return Case(asked(case.body), None if case.plain is None else asked(case.plain), case.cut, case.form)

        return self.shows([Step(list(map(changed, step.cases)), step.slots) for step in self.best.group])


def _report(play: Play, found: Wrong) -> Fields:
    again = Shrinking(play, found)
    shown = sum(again.shows(found.group, always=True) for _ in range(REPEATS))
    one, right = found.divergence, found.right
    sure = [f"the same requests show it {shown} times of {REPEATS}"]
    if one.gap is not None:
        sure.append(f"the two tokens are {one.gap:.3g} nats apart, and rounding moves them by {one.noise:.2g}")
    why = one.why or f"token {one.at} is {one.said!r}, and must be {one.best!r}"
    calls = found.answer.tool_calls
    return {
        "scenario": found.scenario,
        "why": why,
        "curl": curl(play, found.group),
        "expected": why if right is None else f"as {play.control.name}: {right.text!r}",
        "observed": json.dumps(calls) if calls and not found.answer.text else found.answer.text,
        "sure": "; ".join(sure),
    }


def sampled_report(server: Endpoint, body: Fields, number: int, found: Finding, seen: Sequence[Seen] = ()) -> Fields:
    """Of sampled answers, which no single request shows: `number` of them, each with a seed of its own.

    seen: outcomes with their shares here and in the control, of which the furthest apart are shown."""
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
    """The requests of a group. What is asked together runs together."""
    out = []
    for step in group:
        together = len(step.cases) > 1 and step.slots > 1
        asked = [line(play.server, play.asked(case.body)) for case in step.cases]
        out += [*(f"{one} &" for one in asked), "wait"] if together else asked
    return out


def line(server: Endpoint, body: Fields, seed: str = "") -> str:
    """One request. seed: where the shell has its seed."""
    model = {"model": server.model} if server.model else {}
    data = shlex.quote(json.dumps(model | body))
    if seed:
        data = f"""{data[:-2]}, "seed": '{seed}'}}'"""
    return f"curl -s {server.url}/chat/completions -H 'content-type: application/json' -d {data}"
