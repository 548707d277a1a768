"""The chat templates that --template names, in the package or in files. Imports nothing slow."""

from importlib.resources import files
from pathlib import Path

from paceline.errors import meant
from paceline.logs.bodies import ConversationError

TEMPLATES = files("paceline.logs") / "templates"


def template_names() -> list[str]:
    """Templates that come with the package."""
    return sorted(file.name.removesuffix(".jinja") for file in TEMPLATES.iterdir() if file.name.endswith(".jinja"))


def source_of(name: str) -> str:
    """The template of that name in the package, or in that file. Raises ConversationError if there is none."""
    if name in template_names():
        return (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    try:
        return Path(name).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConversationError(
            f"{name!r} is neither a template nor a file that can be read.{meant(name, template_names())} "
            f"Templates: {', '.join(template_names())}."
        ) from None
