"""The options tables of docs/methods, and what docs/published-drafters.md refuses, made from the code.

python -m tests.draft.docs        # write them into the pages
"""

import json
import re
from pathlib import Path

from paceline.draft.registry import describe, names
from paceline.formats.heads.dflash import LAYOUT as DFLASH
from paceline.formats.heads.eagle import EAGLE3
from paceline.formats.heads.layout import FLAGS, OTHERS

PAGES = Path(__file__).parents[2] / "docs" / "methods"
BETWEEN = re.compile(r"(<!-- options: python -m tests\.draft\.docs -->\n).*?(<!-- end -->)", re.DOTALL)


PUBLISHED = PAGES.parent / "published-drafters.md"
REFUSED = re.compile(r"(<!-- refused: python -m tests\.draft\.docs -->\n).*?(<!-- end -->)", re.DOTALL)


def options_table(info):
    """Markdown: one row an option."""
    if not info.options:
        return "None.\n"
    lines = ["| option | default | values | meaning |", "|---|---|---|---|"]
    lines += [f"| `{o.name}` | {_default(o)} | {_values(o)} | {o.help} |" for o in info.options]
    return "\n".join(lines) + "\n"


def page(name):
    """The page of a method."""
    return PAGES / f"{name}.md"


def with_table(text, info):
    """A page's text with the table as the code has it; ValueError if the page has no place for it."""
    if not BETWEEN.search(text):
        raise ValueError(f"docs/methods/{info.name}.md has no place for its options: {BETWEEN.pattern}")
    return BETWEEN.sub(lambda found: found[1] + options_table(info) + found[2], text)


def _default(option):
    text = f"`{str(option.default).lower() if option.default is None else option.default}`"
    return text if option.in_front is None else f"{text}; `{option.in_front}` in front of another drafter"


def _values(option):
    return option.type.replace("choice", ", ".join(f"`{choice}`" for choice in option.choices))


def with_refused(text):
    """The text of `PUBLISHED` with what `formats/heads/` refuses, by the names of its tables."""
    lines = ["Other drafters, by their tensors or by what config.json says that they are:", ""]
    lines += [f"- {what}" for what in OTHERS]
    lines += ["", "| entry of config.json | in files of | what is read |", "|---|---|---|"]
    for method, flags in {"every layout": FLAGS, "eagle3": EAGLE3.flags, "dflash": DFLASH.flags}.items():
        for key, read in flags.items():
            values = " or ".join(f"`{json.dumps(value)}`" for value in read)
            lines.append(f"| `{key}` | {method} | {values or 'none'} |")
    return REFUSED.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], text)


if __name__ == "__main__":
    for name in names():
        page(name).write_text(with_table(page(name).read_text(), describe(name)))
    PUBLISHED.write_text(with_refused(PUBLISHED.read_text()))
