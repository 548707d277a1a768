"""A certificate in words, and as a page that loads nothing.

page(certificate), findings(certificate)        # of what `paceline certify --json` prints
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.certify.verdict import CANNOT_SAY, LOSSLESS
from paceline.workbench.report import render

TEMPLATE = Path(__file__).with_name("page.html.jinja")
SHOWN = 5
"""Sets of tokens that are named, of those that come too often or too rarely."""
NOTABLE = 0.001
"""A shift that is named where rounding hides it."""


def page(certificate: dict[str, Any]) -> str:
    """The page, HTML."""
    about = {**certificate["ran_on"], **certificate["environment"]}
    versions = [(k, v) for k, v in about.items() if isinstance(v, str | int | float | bool)]
    return render(
        TEMPLATE,
        c=certificate,
        verdict=verdict(certificate),
        findings=findings(certificate),
        detectable=detectable(certificate),
        versions=versions,
    )


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
    if not lines:
        ties = f", {greedy['ties']} ties" if greedy["ties"] else ""
        asked = f"; {sampled['requests']:,} sampled requests, p = {sampled['p']:.2g}" if sampled["requests"] else ""
        long = f"; {sampled['long']['tokens']:,} tokens of longer samples" if "long" in sampled else ""
        lines.append(f"{greedy['tokens']:,} greedy tokens are the model's own{ties}{asked}{long}.")
    if sampled["plain_differs"]:
        lines.append(
            f"Without drafts this engine samples another distribution than the model's too (p = {_p(sampled):.1g}); "
            f"drafts do not change it (p = {sampled['p_of_difference']:.2g})."
        )
    if sampled.get("drafted_rounds") is not None:
        lines.append(f"{sampled['drafted_rounds']:,} rounds of sampled answers had a draft.")
    reference = certificate.get("reference", "")
    own = [f"The reference is {reference}."] if reference.startswith("our own") else []
    return [*lines, *own, *_acceptance(certificate["acceptance"])]


def _p(sampled: dict[str, Any]) -> float:
    return float(min(sampled["p"], sampled["p_of_worst_case"]))


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
