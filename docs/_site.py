"""What the site has beside the pages: every command's help, and the Python interface. A hook of mkdocs."""

import re
from typing import Any

import griffe
import typer
from mkdocs.structure.files import File, Files

from paceline.cli import app

PYTHON = """# Python

What `paceline` exports is [stable](../stability.md); so is the base of drafters.

::: paceline.engine.engine.Engine
::: paceline.core.sampling.SamplingParams
::: paceline.core.tree.DraftTree
::: paceline.errors.PacelineError
::: paceline.draft.base
"""


def commands() -> str:
    """Markdown: the help of every command that is not hidden."""
    lines = ["# Commands", "", "What `paceline COMMAND --help` prints.", ""]

    def walk(command: Any, path: tuple[str, ...]) -> None:
        context = command.context_class(command, info_name=" ".join(path), terminal_width=100, max_content_width=100)
        text = re.sub(r"\x1b\[[0-9;]*m", "", command.get_help(context))
        lines.extend([f"## {' '.join(path)}", "", "```text", text.rstrip(), "```", ""])
        for name, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                walk(inner, (*path, name))

    walk(typer.main.get_command(app), ("paceline",))
    return "\n".join(lines)


class Terms(griffe.Extension):
    """Lines of docstrings such as `model   a folder` become a list, each with the lines indented below it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^(\w[\w, ]*?) {2,}(?=\S)", r"- **\1** ", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"([^\n-][^\n]*\n)(- \*\*)", r"\1\n\2", text, count=1)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and leave the figures' records out."""
    for name, content in {"reference/commands.md": commands(), "reference/python.md": PYTHON}.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that leave docs/ go to the forge's view of the checkout; without one, to the name alone."""
    depth = page.file.src_uri.count("/") + 1
    up = rf"\]\((?:\.\./){{{depth}}}"
    if config["repo_url"]:
        return re.sub(up + r"([^)\s]+)\)", lambda found: f"]({config['repo_url']}/blob/main/{found[1]})", markdown)
    return re.sub(r"\[([^\]]+)" + up + r"[^)\s]+\)", r"\1", markdown)
