"""What is to be certified, and how closely. Imports no torch: the command line makes its options of these fields."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from paceline.draft.spec import option
from paceline.engine.options import Draft, ModelOptions, Placement
from paceline.errors import PacelineError, meant
from paceline.formats.place import check_place
from paceline.given import checked, listed
from paceline.net.keys import Keys
from paceline.peers import HOSTS, PEERS

SHIFT = 0.02  # The default of `Scope.shift`.
STRUCTURED = ("JSON schema", "regular expression", "tool calls")  # These features give an answer its form.
REQUESTS = tomllib.loads(Path(__file__).with_name("requests.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Scope:
    """What is tested, and how closely.

    requests  number of sampled requests; None: as many as `shift` takes, 0: no sampling.
    length    number of first tokens whose joint distribution is tested."""

    GROUP: ClassVar = "Tests"

    shift: float | None = option(
        None,
        "Smallest shift of a sampled distribution that the tests find with 95 %, however long that takes. [default: "
        "as small as the budget allows; 0.02 for an engine of this process]",
        least=0.001,
        most=0.5,
    )
    requests: int | None = option(
        None,
        "Number of sampled requests; 0 tests only greedy answers. [default: as many as --shift takes, or the budget "
        "allows]",
        least=0,
    )
    length: int = 3
    max_tokens: int = option(
        64, "Largest number of new tokens of a greedy answer.", least=1, names=("--max-tokens", "-n")
    )
    seed: int = option(0, "Seed from which the seeds of requests are made.", least=0)
    leave_out: str | None = option(
        None,
        "Features that requests do not use, joined by commas: top_k,min_p. Use it if a feature makes the server "
        "fail.",
    )
    budget: str = option(
        "5m", "Time for the tests: 90s, 5m, 1h; 0 sets no limit and leaves out scenarios.", metavar="TIME"
    )

    def __post_init__(self) -> None:
        _ = self.seconds, self.left_out

    @property
    def seconds(self) -> float:
        """The budget in seconds. Raises PacelineError if it is no time."""
        if (match := re.fullmatch(r"([0-9.]*[0-9])\s*([smh]?)", self.budget.strip())) is None:
            raise PacelineError(f"--budget is {self.budget!r}; it is a time such as 90s, 5m or 1h")
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]

    @property
    def left_out(self) -> set[str]:
        """Features that are not asked for. Raises PacelineError for a name that is no feature."""
        names, known = listed(self.leave_out), [*REQUESTS["features"], *STRUCTURED]
        if unknown := next((name for name in names if name not in known), ""):
            raise PacelineError(f"there is no feature {unknown!r}.{meant(unknown, known)} Features: {', '.join(known)}")
        return set(names)

    @property
    def is_bounded(self) -> bool:
        """Whether the budget ends sampling: only if neither `requests` nor `shift` is given."""
        return self.requests is None and self.shift is None and self.seconds > 0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is tested, and how. prompts: on the command line a file, later the prompts in it."""

    scope: Scope = field(default_factory=Scope)
    batch: int = option(8, "Largest number of requests at once.", least=1, names=("--batch", "-b"))
    prompts: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineTest(Subject, ModelOptions):
    """The engine under test. prompts: for greedy answers, in a form that the engine takes; None: the built-in ones."""

    model: str = option(
        help="Model that the engine runs: a folder, smollm2, or a Hugging Face id.", argument=True, metavar="TARGET",
        callback=checked(check_place),
    )
    draft: Draft = "none"
    engine: str = option(
        "paceline",
        "Engine to test: paceline, transformers, vllm, llama-cpp:FILE.gguf (with --draft), or a peer of `bench`.",
    )
    against: Literal["float32"] | None = option(
        None, "For weights in blocks: float32 compares with the same weights with nothing rounded. [default: TARGET]"
    )
    peer_python: str | None = option(
        None, "Python interpreter of an environment with vLLM.", envvar="PACELINE_VLLM_PYTHON"
    )

    def __post_init__(self) -> None:
        """Raises PacelineError for an engine that does not exist."""
        name, known = re.split("[:,]", self.engine)[0], dict.fromkeys(("paceline", *HOSTS, *PEERS))
        if name not in known:
            raise PacelineError(f"there is no engine {name!r}.{meant(name, known)} Engines: {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class ServerTest(Subject, Placement):
    """The server under test."""

    server: str = option(
        help="OpenAI-compatible server to test, up to /v1.", argument=True, metavar="URL[#model]"
    )
    against: str | None = option(
        None,
        "What to compare with: a server of the same model without drafts, URL[#model], or a model that our engine runs "
        "here. [default: the server with its drafts off if a request can turn them off, else its own answers one at a "
        "time and their log-probabilities]",
        metavar="URL|MODEL",
    )
    keys: Keys = field(default_factory=Keys)

    @property
    def control(self) -> str | None:
        """The server that this one is compared with, None if there is none."""
        return self.against if self.against and self.against.startswith(("http://", "https://")) else None
