"""What is made of a certificate for others: an issue to file upstream, JUnit's XML, and requests as lines of a shell.

    issue(certificate)      # Markdown
    junit(certificate)      # XML, a test case for each scenario and each other test
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from paceline.certify.asking import Endpoint, Fields
from paceline.certify.page import findings

if TYPE_CHECKING:
    from paceline.certify.scenarios import Group


def curl(server: Endpoint, group: Group) -> list[str]:
    """The requests of a group. What is asked together runs together."""
    out = []
    for step in group:
        together = len(step.cases) > 1 and step.slots > 1
        out += [line + (" &" if together else "") for case in step.cases for line in lines(server, case.body)]
        out += ["wait"] if together else []
    return out


def lines(server: Endpoint, body: Fields, seed: str = "") -> list[str]:
    """One request. seed: where the shell has its seed."""
    model = {"model": server.model} if getattr(server, "model", "") else {}
    data = shlex.quote(json.dumps(model | body))
    if seed:
        data = f"""{data[:-2]}, "seed": '{seed}'}}'"""
    return [f"curl -s {server.url}/chat/completions -H 'content-type: application/json' -d {data}"]


def issue(certificate: dict[str, Any]) -> str:
    """What one would file upstream: what is wrong, and how to see it."""
    about = {**certificate["ran_on"], **certificate["environment"]}
    facts = [f"- {name}: {value}" for name, value in about.items() if isinstance(value, str | int | float | bool)]
    reports = certificate.get("reports", [])
    title = reports[0]["why"] if reports else findings(certificate)[0]
    return "\n".join([
        f"# With drafts: {title}",
        "",
        f"Found by `paceline certify` in {certificate['engine']}. Model: {certificate['target']}.",
        "",
        *facts,
        *(line for report in reports for line in _section(report)),
        "",
        *([] if reports else ["## Findings", "", *findings(certificate)]),
    ])  # fmt: skip


def _section(report: Fields) -> Sequence[str]:
    out = [f"\n## {report['scenario']}: {report['why']}", "\n```sh", *report["curl"], "```"]
    expected, observed = report["expected"], report["observed"]
    if isinstance(expected, dict):
        rows = [f"| {json.dumps(text)} | {share:.4f} | {observed[text]:.4f} |" for text, share in expected.items()]
        out += ["\n| text begins | expected | observed |", "|---|---:|---:|", *rows]
    else:
        out += [f"\nExpected: {expected}", f"\nObserved: {observed!r}"]
    return [*out, f"\nHow sure: {report['sure']}."]


def junit(certificate: dict[str, Any]) -> str:
    """A test suite: a failure for each test that found something, and skipped what was not tested."""
    tests = [(row["scenario"], row["verdict"], row["why"], row["seconds"]) for row in certificate.get("scenarios", ())]
    for name in ("greedy", "stops", "sampled"):
        facts = certificate[name]
        asked = facts.get("answers", facts.get("requests"))
        verdict = "passed" if asked and facts["lossless"] else "wrong" if asked else "not tested"
        tests.append((name, verdict, "; ".join(findings(certificate)) if verdict == "wrong" else "", 0.0))
    suite = ElementTree.Element("testsuite", name="paceline certify", tests=str(len(tests)))
    for key, verdict in (("failures", "wrong"), ("skipped", "not tested")):
        suite.set(key, str(sum(test[1] == verdict for test in tests)))
    for name, verdict, why, seconds in tests:
        case = ElementTree.SubElement(suite, "testcase", classname=certificate["engine"], name=name, time=str(seconds))
        if verdict in ("wrong", "not tested"):
            ElementTree.SubElement(case, "failure" if verdict == "wrong" else "skipped", message=why)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, "unicode") + "\n"
