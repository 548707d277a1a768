"""A certificate in words, as a page that loads nothing, as an issue to file upstream, and as JUnit's XML.

page(certificate), issue(certificate), junit(certificate), findings(certificate)   # of what `certify --json` prints"""

from pathlib import Path
from typing import Any

from paceline.certify.verdict import CANNOT_SAY, LOSSLESS, TWO_MODELS
from paceline.runs.report import render

PAGE, ISSUE, JUNIT, FINDINGS, POWER = (
    Path(__file__).with_name(f"{name}.jinja")
    for name in ("page.html", "issue.md", "junit.xml", "findings.txt", "power.txt")
)


def page(certificate: dict[str, Any]) -> str:
    """The certificate as one HTML page."""
    return render(PAGE, verdict=verdict(certificate), detectable=detectable(certificate), **_facts(certificate))


def issue(certificate: dict[str, Any]) -> str:
    """What one would file upstream, Markdown: what is wrong, on what, and how to see it."""
    return render(ISSUE, **_facts(certificate))


def junit(certificate: dict[str, Any]) -> str:
    """A test case for each scenario and each other test, XML; what was not tested is skipped."""
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
    """What was found, a line for each test that found something, and one for all if none did."""
    return render(FINDINGS, c=certificate).splitlines()


def detectable(certificate: dict[str, Any]) -> list[str]:
    """What the tests could have found, and what was not tested: a line for each reason."""
    why = dict[str, list[str]]()
    for line in certificate["not_tested"]:
        what, _, reason = line.partition(": ")
        why.setdefault(reason, []).append(what)
    return render(POWER, c=certificate, not_tested=why).splitlines()
