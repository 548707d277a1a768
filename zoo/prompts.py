"""24 fixed prompts for the model card, four of each of six kinds (prompts.toml)."""

import tomllib
from importlib.resources import files

PROMPTS: dict[str, list[str]] = tomllib.loads(files(__package__).joinpath("prompts.toml").read_text("utf-8"))
