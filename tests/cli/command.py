"""The command line as its users meet it: arguments in; exit status, standard output and standard error out."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]
