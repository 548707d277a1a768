"""A certificate in words, and as a page that loads nothing.

page(certificate), findings(certificate)        # of what `paceline certify --json` prints
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.workbench.report import render

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def page(certificate: dict[str, Any]) -> str:
    """The page, HTML."""
    about = {**certificate["ran_on"], **certificate["environment"]}
    versions = [(k, v) for k, v in about.items() if isinstance(v, str | int | float | bool)]
    return render(
        TEMPLATE,
        c=certificate,
        findings=findings(certificate),
        detectable=detectable(certificate),
        versions=versions,
    )


def findings(certificate: dict[str, Any]) -> list[str]:
    """What was found, a line for each test that found something, and one for all if none did."""
    greedy, stops, sampled = certificate["greedy"], certificate["stops"], certificate["sampled"]
    lines = []
    if greedy["bugs"]:
        first = greedy["shown"][0]
        where = f"prompt {first['prompt']}, token {first['at']}, {first['company']}"
        apart = "the logits are {gap:.4g} apart, and rounding moves them by {noise:.2g}"
        why = first["why"] or apart.format(**first)
        lines.append(f"Greedy: {greedy['bugs']} of {greedy['answers']} answers are wrong; first {where}: {why}.")
    elif not greedy["lossless"]:
        lines.append(f"Greedy: nothing could be compared; {greedy['why']}.")
    if stops["bugs"]:
        lines.append(f"Stop strings: {stops['bugs']} of {stops['answers']} answers do not end where they must.")
    if not sampled["lossless"]:
        p = min(sampled["p"], sampled["p_of_worst_case"])
        lines.append(
            f"Sampling: the first tokens have another distribution (p = {p:.1g}); the total variation of the worst "
            f"case is {sampled['tv']:.3f}, and chance makes {sampled['tv_by_chance']:.3f}."
        )
    wrong = [row for row in certificate.get("scenarios", ()) if row["verdict"] == "wrong"]
    lines += [f"{row['scenario']}: {row['bugs']} of {row['answers']} answers are wrong." for row in wrong]
    for one in certificate.get("reports", ()):
        lines.append(f"{one['scenario']}: {one['why']}. The smallest request that shows it: {' '.join(one['curl'])}")
    if not lines:
        ties = f", {greedy['ties']} ties" if greedy["ties"] else ""
        asked = f"; {sampled['requests']:,} sampled requests, p = {sampled['p']:.2g}" if sampled["requests"] else ""
        lines.append(f"{greedy['tokens']:,} greedy tokens are the model's own{ties}{asked}.")
    reference = certificate.get("reference", "")
    own = [f"The reference is {reference}, which has no such model."] if reference.startswith("our own") else []
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
    return lines
