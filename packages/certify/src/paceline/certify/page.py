"""Print a certificate: in words, as a page that loads nothing, as an issue to file upstream, and as JUnit's XML.

page(certificate), issue(certificate), junit(certificate), findings(certificate)    # of `certify --json`"""

from pathlib import Path
from typing import Any

from paceline.certify.verdict import CANNOT_SAY, LOSSLESS, NOT_LOSSLESS, TWO_MODELS
from paceline.runs.report import Part, Report, Section, Table, marked, render

ISSUE, JUNIT, FINDINGS, POWER = (
    Path(__file__).with_name(f"{name}.jinja") for name in ("issue.md", "junit.xml", "findings.txt", "power.txt")
)
TESTED = "answers = answers:0; tokens = tokens:0; bugs = bugs; ties = ties"
CASES = "requests = requests:0; outcomes = outcomes; total\nvariation = tv:4; by chance = tv_by_chance:4"
SCENARIOS = "verdict = verdict; answers = answers:0; bugs = bugs; ties = ties; seconds = seconds"
BUG = (
    "A bug: the model alone would not have written this. A tie: it is as good as the best, as far as rounding can tell."
)
VARIATION = (
    "Total variation: the share of the answers that lie on other outcomes than they should. By chance: what a lossless "
    "engine has of it, on average, after so many requests. p: how often one would lie at least as far off."
)


def page(certificate: dict[str, Any]) -> str:
    """The certificate as one HTML page."""
    c, greedy, stops = certificate, certificate["greedy"], certificate["stops"]
    kind = "yes" if c["lossless"] else "no" if c["verdict"] == NOT_LOSSLESS else "unsure"
    by_token = "token by token: greedy" + (", and sampled with a seed" if greedy.get("seeded") else "")
    tested = Table.of([greedy, stops | {"ties": None}], TESTED, ("test", [by_token, "stop strings"]))
    cases, played = c["sampled"]["cases"], c.get("scenarios") or ()
    chances = [f"{one['p']:.2g}" for one in cases]
    joint = Table.of(cases, CASES, ("case", [one["name"] for one in cases]), ("p", chances))
    named = [row["scenario"] + (f" ({row['why']})" if row["why"] else "") for row in played]
    scenarios = Table.of(played, SCENARIOS, ("scenario", named))
    divergences = "First divergences" if greedy["bugs"] else "Ties: two tokens that rounding cannot tell apart"
    first = f"Sampled answers: the joint distribution of the first {c['power']['tokens']} tokens"
    ends = [
        marked("pre", f"stop {one['stop']}\nsaid  {one['text']}\nright {one['right']}")
        for one in stops.get("shown") or ()
    ]
    versions = ", ".join(f"{name} {value}" for name, value in _facts(c)["versions"])
    sections = [
        Section("What was tested", [tested, BUG]),
        Section(first, [joint, VARIATION] if cases else []),
        Section("Scenarios", [scenarios] if played else []),
        *(Section(f"{one['scenario']}: {one['why']}", _report(one)) for one in c.get("reports") or ()),
        Section("What could have been detected", detectable(c)),
        Section(divergences, [marked("pre", _divergence(one)) for one in greedy.get("shown") or ()]),
        Section("Answers that did not end at a stop string", ends),
        Section("Versions", [f"{versions}. {c['seconds']} s."]),
    ]
    facts = [marked("p", verdict(c), f"verdict {kind}"), *findings(c)]
    return Report(f"{c['engine']}, {c['target']}", facts, sections, window=f"Certificate of {c['engine']}").html()


def _report(one: dict[str, Any]) -> list[Part]:
    said = f"expected {one['expected']}\nobserved {one['observed']}\n{one['sure']}"
    return [marked("pre", "\n".join(one["curl"])), marked("pre", said)]


def _divergence(one: dict[str, Any]) -> str:
    """Describe a token that is not the model's, after the text before it."""
    before, said, best = (one.get(f"{name}_text") or one[name] for name in ("before", "said", "best"))
    why = f", {one['why']}" if one.get("why") else ""
    far = "" if one["gap"] is None else f"\ngap {one['gap']}, noise {one['noise']}"
    where = f"{one['verdict']}: prompt {one['prompt']}, token {one['at']}, {one['company']}{why}"
    return f"{where}\n\n…{before} [{said}] instead of [{best}]{far}"


def issue(certificate: dict[str, Any]) -> str:
    """An issue to file upstream, Markdown: the bug, the setup, and the requests that show it."""
    return render(ISSUE, **_facts(certificate))


def junit(certificate: dict[str, Any]) -> str:
    """JUnit's XML: a test case for each scenario and each other test. Tests that did not run are skipped."""
    tests = [dict(row) for row in certificate.get("scenarios", ())]
    for name in ("greedy", "stops", "sampled"):
        part = certificate[name]
        asked = part.get("answers") or part.get("requests") or part.get("long")
        ran = "passed" if part["lossless"] else "wrong"
        why = "" if part["lossless"] else "; ".join(findings(certificate))
        tests.append({"scenario": name, "verdict": ran if asked else "not tested", "why": why, "seconds": 0.0})
    return render(JUNIT, tests=tests, **_facts(certificate))


def _facts(certificate: dict[str, Any]) -> dict[str, Any]:
    about = {**certificate["ran_on"], **certificate["environment"]}
    versions = [(k, v) for k, v in about.items() if isinstance(v, str | int | float | bool)]
    return {"c": certificate, "findings": findings(certificate), "versions": versions}


def verdict(certificate: dict[str, Any]) -> str:
    """The verdict in a few words."""
    words = {LOSSLESS: "Lossless, as far as was tested", CANNOT_SAY: "Cannot say: ", TWO_MODELS: "Two models: "}
    said = words.get(certificate["verdict"], "Not lossless")
    return said + certificate["why"] if said.endswith(": ") else said


def findings(certificate: dict[str, Any]) -> list[str]:
    """A line for each test that found something, or one line if none did."""
    return render(FINDINGS, c=certificate).splitlines()


def detectable(certificate: dict[str, Any]) -> list[str]:
    """Lines on what the tests could have found, and a line for each reason why something was not tested."""
    why = dict[str, list[str]]()
    for line in certificate["not_tested"]:
        what, _, reason = line.partition(": ")
        why.setdefault(reason, []).append(what)
    return render(POWER, c=certificate, not_tested=why).splitlines()
