"""The command line as its users meet it: arguments in; exit status, standard output and standard error out."""

from dataclasses import dataclass

from paceline.cli.train import RECIPES


@dataclass
class Result:
    code: int
    out: str
    err: str


WHERE = {("train", name): where for name, (where, _) in RECIPES["recipes"].items()}
WHERE |= {("train", "tools", name): where for name, (where, _) in RECIPES["tools"].items()}
WHERE[("export", "vllm")] = "paceline.train.export:command"
"""The functions of commands that are imported when they run."""


def commands(group, path=""):
    """All of Click's commands by their words."""
    inner = getattr(group, "commands", None)
    if inner is None:
        return {path: group}
    return {name: one for word, part in inner.items() for name, one in commands(part, f"{path} {word}".strip()).items()}
