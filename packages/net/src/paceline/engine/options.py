"""Options of a model and of an engine. Imports no torch: the command line makes its options of these fields."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from paceline.core import rules
from paceline.draft.registry import named
from paceline.draft.spec import option
from paceline.formats.place import check_place
from paceline.given import checked

Draft = Annotated[
    str, option(
        help="Drafter, name[:checkpoint][,key=value...]; join several by +, and put paths with + or , into double "
        "quotes. `paceline methods` lists them.",
        names=("--draft", "-d"), callback=checked(named),
    )
]  # fmt: skip
DraftOrBrought = Annotated[
    str | None, option(
        help="Drafter, name[:checkpoint][,key=value...]; join several by +, and put paths with + or , into double "
        "quotes. `paceline methods` lists them. [default: suffix; auto:mtp?|suffix for a model that brings a head]",
        names=("--draft", "-d"), callback=checked(named),
    )
]  # fmt: skip
Budget = Annotated[
    bool, option(
        help="Draft as many tokens as measured times say to pay; --no-budget: as many as the drafter proposes.",
        names=("--budget/--no-budget",),
    )
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model is computed."""

    GROUP: ClassVar = "Engine"

    device: str = option(
        "auto", "Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ...",
        callback=checked(rules.check_device),
    )
    threads: int | None = option(
        None, "Number of CPU threads. [default: torch's, fewer while other processes are busy]", least=1, most=1024
    )

    def use_threads(self) -> None:
        """Let torch use `threads` threads; None: as many as it likes."""
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Placement):
    """How a model is computed."""

    GROUP: ClassVar = "Engine"

    dtype: str = option(
        "auto",
        "Dtype of the weights: auto (the model's own; blocks of a GGUF file are kept), float32, bfloat16, float16 "
        "(blocks are expanded), int8 or int4 (this makes another model).",
        callback=checked(rules.check_dtype),
    )
    exact: bool | None = option(
        None,
        "Give bit-identical logits with any draft and in any batch (native decoder on CPUs). [default: on where it "
        "costs no time]",
        names=("--exact/--no-exact",),
    )
    activations: int | None = option(
        None,
        "Bits to which the inputs of weights in blocks (GGUF, int8, int4) are rounded. With 16, answers equal those of "
        "the same weights in float32, except at rare near-ties. [default: 16 where it costs little time]",
        metavar="8|16", least=8, most=16,
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """What an engine runs with."""

    GROUP: ClassVar = "Engine"

    tokenizer: str | None = option(
        None, "Folder of the tokenizer. [default: the model's]", callback=checked(check_place)
    )
    cache_memory: str | None = option(
        None,
        "Largest memory for keys and values, such as 2GB; requests wait until there is room. [default: half of the "
        "free memory]",
        callback=checked(rules.parse_bytes),
    )
    context: int | None = option(
        None, "Most tokens of a prompt and its answer. [default: the model's context]", least=2
    )
    reuse: bool = option(True, "Compute the common beginning of prompts once. Some drafters do not allow it.")
    prefix_cache: str | None = option(None, "A folder that keeps keys and values of prompts for later runs.")
    prefix_cache_size: str = option(
        "8GB", "Largest size of the folder of --prefix-cache; files used longest ago are removed first.",
        callback=checked(partial(rules.parse_bytes, option="prefix_cache_size")),
    )
    budget: Budget = True
