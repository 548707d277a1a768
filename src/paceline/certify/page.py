"""A certificate in words, as a page that loads nothing, as an issue to file upstream, and as JUnit's XML.

page(certificate), issue(certificate), junit(certificate), findings(certificate)   # of what `certify --json` prints"""

from pathlib import Path
from typing import Any

from paceline.certify.verdict import CANNOT_SAY, LOSSLESS
from paceline.workbench.report import render

PAGE, ISSUE, JUNIT = (Path(__file__).with_name(f"{name}.jinja") for name in ("page.html", "issue.md", "junit.xml"))
SHOWN = 5  # sets of tokens that are named, of those that come too often or too rarely
NOTABLE = 0.001  # a shift that is named where rounding hides it


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
    if certificate["verdict"] == LOSSLESS:
        return "Lossless, as far as was tested"
    if certificate["verdict"] == CANNOT_SAY:
        return f"Cannot say: {certificate['why']}"
    return "Not lossless"


def findings(certificate: dict[str, Any]) -> list[str]:
    """What was found, a line for each test that found something, and one for all if none did."""
    greedy, stops, sampled = certificate["greedy"], certificate["stops"], certificate["sampled"]
    lines = [f"Greedy: {one['what']}." for one in greedy["findings"]]
    if greedy["why"]:
        lines.append(f"Greedy: nothing could be compared; {greedy['why']}.")
    if stops["bugs"]:
        lines.append(f"Stop strings: {stops['bugs']} of {stops['answers']} answers do not end where they must.")
    lines += [f"Sampling: {one['what']}." for one in sampled["findings"][:SHOWN]]
    wrong = [row for row in certificate.get("scenarios", ()) if row["verdict"] == "wrong"]
    lines += [f"{row['scenario']}: {row['bugs']} of {row['answers']} answers are wrong." for row in wrong]
    for one in certificate.get("reports", ()):
        lines.append(f"{one['scenario']}: {one['why']}. The smallest request that shows it: {' '.join(one['curl'])}")
    if not lines:
        ties = f", {greedy['ties']} ties" if greedy["ties"] else ""
        asked = f"; {sampled['requests']:,} sampled requests, p = {sampled['p']:.2g}" if sampled["requests"] else ""
        long = f"; {sampled['long']['tokens']:,} tokens of longer samples" if "long" in sampled else ""
        lines.append(f"{greedy['tokens']:,} greedy tokens are the model's own{ties}{asked}{long}.")
    if sampled["plain_differs"]:
        lines.append(
            "Without drafts this engine samples another distribution than the model's too "
            f"(p = {min(sampled['p'], sampled['p_of_worst_case']):.1g}); drafts do not change it "
            f"(p = {sampled['p_of_difference']:.2g})."
        )
    if sampled.get("drafted_rounds") is not None:
        lines.append(f"{sampled['drafted_rounds']:,} rounds of sampled answers had a draft.")
    reference = certificate.get("reference", "")
    own = [f"The reference is {reference}."] if reference.startswith("our own") else []
    return [*lines, *own, *_acceptance(certificate["acceptance"])]


def _acceptance(facts: dict[str, Any]) -> list[str]:
    measured, reference = facts["tokens_a_round"], facts["reference"]
    if measured is None:
        return []
    replayed = "" if reference is None else f"; the same drafter replayed has {reference:.2f}"
    collapsed = (
        ". Acceptance has collapsed: look for a wrong flag, chat template or kernel" if facts["collapsed"] else ""
    )
    return [f"{measured:.2f} tokens a round{replayed}{collapsed}."]


def detectable(certificate: dict[str, Any]) -> list[str]:
    """What the tests could have found."""
    power = certificate["power"]
    lines = [f"Greedy: bugs in more than one of {1 / power['greedy_rate']:,.0f} tokens are found with 95 %."]
    if certificate["sampled"]["cases"]:
        lines.append(
            f"Sampling: a shift of {100 * power['detectable']:.2g} % of the probability of the outcomes counted is "
            f"found with 95 %, one of {100 * power['shift']:.2g} % with {100 * power['power']:.0f} %. "
            f"A lossless engine is accused in {power['level']:.1g} of all certificates."
        )
    if power.get("hidden", 0) > NOTABLE:
        lines.append(
            f"Rounding can hide a shift of {100 * power['hidden']:.2g} % from any number of requests; --dtype float32 "
            "or --exact hides less."
        )
    return lines
