"""Options of a build, a model and a training: dataclasses whose fields are options of the command line, or of a model's
name. Imports neither NumPy nor torch, so that the help of commands is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.draft.spec import cut, option, parse, quoted, values
from paceline.errors import MethodError, PacelineError, meant
from paceline.net.keys import Keys
from paceline.outputs import check_folder, output

Split = Literal["all", "train", "test"]
Scope = Literal["own", "batch"]
Negatives = Literal["both", "text", "image"]


@dataclass(frozen=True)
class BuildOptions:
    """Options that decide every byte of a build."""

    seed: int = option(0, "Seed of the data; the same seed gives the same bytes.", least=0)
    size: int = option(512, "Width and height of a picture in pixels.", least=32)
    split: Split = option("all", "Objects and templates to use: all, or one of two disjoint parts.")
    objects: str = option(
        "procedural",
        "Where objects come from: procedural, diffusion:MODEL, or a folder of RGBA cut-outs with objects.json.",
    )
    backgrounds: str | None = option(
        None, "Where backgrounds come from: a folder of pictures, or inpaint:MODEL. [default: drawn]"
    )
    count_size: Literal["case", "image"] = option(
        "case", "Size of counted objects: one for a case, or another in each picture."
    )


@dataclass(frozen=True)
class RunOptions:
    """What is evaluated, and how."""

    model: str = option(help="Model to test: oracle, random, constant, transformers:PATH, a server's URL#model, ...")
    subsets: str = option("", "Subsets to test, joined by commas. [default: all]")
    ties: Literal["shared", "first"] = option(
        "shared", "How equal scores count: they share the credit, or the first key gets it, as in the official code."
    )
    batch: int = option(64, "Number of pictures encoded at once.", least=1)
    keys: Keys = field(default_factory=Keys)
    out: Path | None = option(None, "Folder to write report.json, scores.npz and replies to.", callback=check_folder)


@dataclass(frozen=True)
class TuneOptions:
    """How two towers are trained. The paper's values are not known; these are ours."""

    steps: int = option(1000, "Number of steps of the optimiser.", least=1)
    batch: int = option(256, "Number of plain pairs in a step.", least=1)
    cases: int = option(32, "Number of cases in a step.", least=1)
    lr: float = option(5e-6, "Peak learning rate.", least=0)
    warmup: int = option(50, "Number of steps until the learning rate has its peak.", least=1)
    weight_decay: float = 0.1
    mu: float = option(0.2, "Weight of the hard negatives.", least=0)
    # The poster's formula can be read either way.
    scope: Scope = option("own", "Where hard negatives come from: the pair's own case, or the whole batch.")
    negatives: Negatives = option("both", "Modality of the hard negatives: texts, pictures, or both.")
    lora: int = option(0, "Train adapters of this rank; 0 trains the weights.", least=0)
    seed: int = option(0, "Seed of the batches, and of the weights of a new model.", least=0)


@output
def check_tuned(out: Path | None) -> Path | None:
    """As `check_folder`, but also raises PacelineError for the folder of a model that no training here has written."""
    if out is not None and (out / "config.json").exists() and not (out / "training.json").exists():
        raise PacelineError(f"{out} holds a model that no training has written; name another folder to write")
    return check_folder(out)


@dataclass(frozen=True)
class TrainOptions:
    """What a training reads and writes."""

    out: Path = option(help="Folder to write.", callback=check_tuned)
    data: Path | None = option(None, "Folder of cases to learn from, written by `eval vision build --split train`.")
    generic: Path | None = option(None, "Plain pairs to mix in: pairs.jsonl, or its folder.")
    validate: Path | None = option(None, "Folder of cases by which the mixture of weights is chosen.")
    retention: Path | None = option(None, "Pairs whose zero-shot accuracy should be kept: pairs.jsonl, or its folder.")
    checkpoints: Path | None = option(
        None, "Folder of the checkpoint and the log. [default: OUT-run]", callback=check_folder
    )
    tolerance: float = option(2.0, "Largest loss of zero-shot accuracy, in points.", least=0)
    device: str = option("cpu", "Device: cpu, cuda, cuda:1, ...")

    @property
    def run(self) -> Path:
        return self.checkpoints or self.out.with_name(self.out.name + "-run")


@dataclass(frozen=True)
class RandomOptions:
    seed: int = 0


@dataclass(frozen=True)
class TowerOptions:
    checkpoint: str
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class EndpointOptions:
    """A generative model behind an OpenAI-compatible API."""

    checkpoint: str  # the address up to and including /v1
    model: str  # the name that the server knows
    ask: Literal["choice", "circular", "yesno", "question"] = "choice"
    cases: int = 50
    """Of each subset; 0 asks all. Pairwise questions about all 9-way cases are 40,500 requests."""
    concurrency: int = 4
    max_tokens: int = 16
    seed: int = 0
    blind: bool = False  # Send a grey picture instead, to see how much captions give away.
    detail: Literal["low", "high", "auto"] = "high"
    key: str | None = None
    """Environment variable that holds the API key, as --api-key-env."""
    timeout: float = 120.0


MODELS: dict[str, type | None] = {
    **dict.fromkeys(("oracle", "geometry", "swapped", "constant")),
    "random": RandomOptions,
    "transformers": TowerOptions,
    "endpoint": EndpointOptions,
}


def read_model(spec: str) -> tuple[str, Any]:
    """A model's name and its options. Raises MethodError with what exists."""
    if spec.startswith(("http://", "https://")):
        address, *others = cut(spec, ",")
        url, _, name = address.partition("#")
        spec = ",".join([f"endpoint:{quoted(url)}", *([f"model={quoted(name)}"] if name else []), *others])
    part = parse(spec)
    if part.name not in MODELS:
        raise MethodError(f"no model {part.name!r}.{meant(part.name, MODELS)} There are {', '.join(MODELS)}.")
    config = MODELS[part.name]
    given = values(part, config)
    if config is EndpointOptions and "model" not in given:
        raise MethodError(f"{part.checkpoint} needs the name that the server knows the model by: URL#NAME")
    return part.name, None if config is None else config(**given)
