"""Scenarios of one's own: one YAML or Markdown file each, with the rules and the prompts to try them on.

name: Recipes                                 # Recipes
description: Answers of a cooking helper.
safety: [Never name a brand.]                 Answers of a cooking helper.
behavioral:
  - text: Two headings, in this order.        ## Safety
    weight: 2                                 - Never name a brand.
  - Answer as far as the rules allow.         ## Behavior
prompts:                                      - (2) Two headings, in this order.
  - prompt: Which flour is best?              - Answer as far as the rules allow.
    label: unsafe                             ## Unsafe prompts
    adversarial_prompt: In a play, ...        - Which flour is best?
  - prompt: How do I make bread?              ## Safe prompts
    label: safe                               - How do I make bread?
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.evals.align.types import Item, Scenario

SECTIONS = {
    "safety": "safety",
    "behavior": "behavioral",
    "behaviour": "behavioral",
    "behavioral": "behavioral",
    "unsafe prompts": "unsafe",
    "safe prompts": "safe",
}


def read_custom(path: Path) -> tuple[Scenario, list[Item]]:
    """The scenario and the items of a file; DataError in one line if it is not of the form."""
    from paceline.evals.align.data import DataError, item_of, numbered

    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    told = _markdown(text) if path.suffix == ".md" else _yaml(text, path)
    key, prompts = path.stem, told.get("prompts")
    if not isinstance(prompts, list) or not prompts:
        raise DataError(f"{path}: a scenario needs prompts, each with a label, unsafe or safe")
    scenario = Scenario(
        key,
        str(told.get("name") or key),
        str(told.get("description") or ""),
        numbered("safety", told.get("safety"), str(path)),
        numbered("behavioral", told.get("behavioral"), str(path)),
    )
    return scenario, [item_of(key, i, row, str(path)) for i, row in enumerate(prompts)]


def _yaml(text: str, path: Path) -> dict[str, Any]:
    import yaml

    from paceline.evals.align.data import DataError

    try:
        told = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(told, dict):
        raise DataError(f"{path} must hold a mapping with name, description, safety, behavioral and prompts")
    return told


def _markdown(text: str) -> dict[str, Any]:
    """Heading 1 is the name, what follows it the description, lists below headings 2 rules and prompts."""
    from markdown_it import MarkdownIt

    told: dict[str, Any] = {"safety": [], "behavioral": [], "prompts": []}
    section, heading, in_item = "", "", False
    for token in MarkdownIt().parse(text):
        if token.type == "heading_open":
            heading = token.tag
        elif token.type == "list_item_open":
            in_item = True
        elif token.type == "list_item_close":
            in_item = False
        elif token.type == "heading_close":
            heading = ""
        elif token.type == "inline":
            words = token.content.strip()
            if heading == "h1":
                told["name"] = words
            elif heading:
                section = SECTIONS.get(words.lower(), "")
            elif in_item and section:
                _take(told, section, words)
            elif not section:
                told["description"] = f"{told.get('description', '')}\n\n{words}".strip()
    return told


def _take(told: dict[str, Any], section: str, words: str) -> None:
    """One item of a list: a rule, "(2)" in front being its weight, or a prompt."""
    if section in ("unsafe", "safe"):
        told["prompts"].append({"prompt": words, "label": section})
        return
    weight = re.match(r"\((\d+(?:\.\d+)?)\)\s+", words)
    rule = {"text": words[weight.end() :], "weight": float(weight[1])} if weight else words
    told[section].append(rule)
