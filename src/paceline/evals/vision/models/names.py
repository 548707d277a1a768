"""Models by name: `oracle`, `transformers:openai/clip-vit-base-patch32`, `endpoint:http://localhost:8000/v1,model=NAME`.

open_model("random,seed=3") makes one; a name that does not exist is answered with those that do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from paceline.draft.spec import Part, parse, values
from paceline.errors import MethodError, meant


@dataclass(frozen=True)
class Nothing:
    """A model without options."""


@dataclass(frozen=True)
class Seeded:
    seed: int = 0


@dataclass(frozen=True)
class Loaded:
    checkpoint: str
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class OpenClipOptions:
    checkpoint: str
    pretrained: str = "openai"
    quick_gelu: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class EndpointOptions:
    """A generative model; `checkpoint` is the address up to and including /v1."""

    checkpoint: str
    model: str = field(metadata={"help": "the name the server knows"})
    ask: Literal["choice", "circular", "yesno", "question"] = "choice"
    cases: int = 50
    """Of each subset; 0 asks all. Pairwise questions about 9-way subsets are 40,500 requests."""
    concurrency: int = 4
    max_tokens: int = 16
    seed: int = 0
    blind: bool = False
    """Send a grey picture instead: what captions alone give away."""
    detail: Literal["low", "high", "auto"] = "high"
    key: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, where the server wants one."""
    timeout: float = 120.0


MODELS: dict[str, tuple[type, str]] = {
    "oracle": (Nothing, "knows the answers"),
    "geometry": (Nothing, "reads the boxes of cases.jsonl"),
    "swapped": (Nothing, "takes each value for the next"),
    "constant": (Nothing, "scores everything the same"),
    "random": (Seeded, "scores at random"),
    "transformers": (Loaded, "CLIP, SigLIP, BLIP and other dual encoders"),
    "matching": (Loaded, "BLIP's image-text matching head"),
    "open_clip": (OpenClipOptions, "models of open_clip"),
    "endpoint": (EndpointOptions, "a generative model over an OpenAI-compatible API"),
}


def read_name(spec: str) -> tuple[str, Any]:
    """The name and its options. Raises MethodError with what exists."""
    part: Part = parse(spec)
    if part.name not in MODELS:
        raise MethodError(f"no model {part.name!r}.{meant(part.name, MODELS)} There are {', '.join(MODELS)}.")
    config = MODELS[part.name][0]
    given = values(part, config if fields(config) else None)
    lacking = [f.name for f in fields(config) if f.name == "model" and f.name not in given]
    if lacking:
        raise MethodError(f"{part.name} needs model=NAME, the name the server knows")
    return part.name, config(**given)


def open_model(name: str, options: Any) -> Any:
    """A model whose scores are a matrix; endpoints are asked in another way."""
    from paceline.evals.vision.models import known

    plain = {"oracle": known.Oracle, "geometry": known.Geometry, "swapped": known.Swapped, "constant": known.Constant}
    if name in plain:
        return plain[name]()
    if name == "random":
        return known.Random(options.seed)
    if name == "transformers":
        from paceline.evals.vision.models.towers import Towers

        return Towers.load(options.checkpoint, options.device, options.dtype)
    if name == "matching":
        from paceline.evals.vision.models.cross import Matching

        return Matching(options.checkpoint, options.device, options.dtype)
    from paceline.evals.vision.models.openclip import OpenClip

    return OpenClip(options.checkpoint, options.pretrained, options.quick_gelu, options.device)
