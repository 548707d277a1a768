"""A model folder: reading its configuration and weights. `place.py` finds it.

Nothing is unpickled, and no code from a folder runs unless the user allows it. Every fault is a ModelError of one line.
"""

import hashlib
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from paceline.core.rules import SAMPLING, check
from paceline.errors import ModelError, PacelineError, kind_of
from paceline.formats.checks import check_limits, is_number, short
from paceline.formats.configurations import import_checks
from paceline.formats.place import one_line
from paceline.jsonl import NotJSON, loads
from paceline.kernels.blocks import Blocks, WeightsByName

INDEX = "model.safetensors.index.json"
METHOD = "paceline"  # quant_method in the config.json of `paceline quantize`
TUNED_FILE = "noise.json"  # `paceline train jacobi` writes it beside the weights.
ALIASES = {"mimo": "qwen2"}  # model types that transformers lacks, and their equivalents


# Its configuration ---------------------------------------------------------------------------------------------------

def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read config.json of `folder` with transformers."""
    file = folder / "config.json"
    if not file.exists():
        inside = sorted(p.parent.name for kind in ("config", "adapter_config") for p in folder.glob(f"*/{kind}.json"))
        hint = f" Did you mean {folder / inside[-1]}?" if inside else ""
        if (folder / "adapter_config.json").exists():
            hint = (
                " It holds an adapter, and a whole model is needed here: merge it into its base model first, with "
                "peft's merge_and_unload."
            )
        raise ModelError(f"{folder} has no config.json, so it is not a model folder.{hint}")
    given = read_json(file)
    model_type = given.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{file} has no model_type: it is not the configuration of a transformers model")
    for part in (given, given.get("text_config")):
        if isinstance(part, Mapping):  # transformers lists all layers, however many there are.
            check_limits(part.get, file, is_native=False)
    import_checks()
    try:
        if model_type in ALIASES:
            own = {key: value for key, value in given.items() if key not in ("model_type", "auto_map")}
            return AutoConfig.for_model(ALIASES[model_type], **own, name_or_path=str(folder))
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # Third-party parsers of many formats may raise anything.
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            hint = "it needs code from its own folder; pass trust_remote_code=True if you trust it"
        elif model_type not in transformers.CONFIG_MAPPING:
            hint = f"transformers {transformers.__version__} does not know model type {model_type!r}"
        else:
            hint = one_line(error)
        raise ModelError(f"{file} cannot be used: {hint}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file. ModelError for anything else."""
    try:
        value = loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object, not {kind_of(value)}")
    return value


def eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Read the tokens that end an answer from config.json and generation_config.json, which have an id or a list."""
    files = {folder / "config.json": getattr(config.get_text_config(), "eos_token_id", None)}
    generation = folder / "generation_config.json"
    if generation.exists():
        files[generation] = read_json(generation).get("eos_token_id")
    ends: set[int] = set()
    for file, ids in files.items():
        every = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(is_number(i) and i >= 0 for i in every):
            raise ModelError(f"{file}: eos_token_id is {short(ids)}; it must be a token id or a list of them")
        ends.update(every)
    return tuple(sorted(ends))


def sampling(facts: Mapping[str, Any], where: Path) -> dict[str, float]:
    """The values of SamplingParams that a checkpoint recommends. ModelError, which names the file `where`, for an
    impossible value."""
    made = {name: value for name in SAMPLING if (value := facts.get(name)) is not None}
    if made.get("top_k") == -1:
        made["top_k"] = 0
    try:
        for name, value in made.items():
            check(name, value)
    except PacelineError as error:
        raise ModelError(f"{where}: {one_line(error)}") from None
    return made


def quantisation(config: PretrainedConfig) -> Mapping[str, Any]:
    """The quantization_config of a folder of `load.quantise_folder`; empty for other folders."""
    method = getattr(config, "quantization_config", None)
    return method if isinstance(method, Mapping) and method.get("quant_method") == METHOD else {}


def has_blocks_of_experts(config: PretrainedConfig) -> bool:
    """Whether a folder's experts are in blocks of four bits, MXFP4, as OpenAI publishes them."""
    method = getattr(config, "quantization_config", None)
    given = method if isinstance(method, Mapping) else {}
    return given.get("quant_method") == "mxfp4" and not quantisation(config)


def untied(config: PretrainedConfig, tensors: Mapping[str, Any]) -> PretrainedConfig:
    """Clear `tie_word_embeddings` in a copy of `config` if the weights have a head that differs from the embedding. The
    head is then used, as in transformers and llama.cpp's converter.

    tensors  weights, or their open files, by name."""
    names = "lm_head.weight", "model.embed_tokens.weight"
    if not config.tie_word_embeddings or not tensors.keys() >= {*names}:
        return config
    found = [(name, tensors[name]) for name in names]
    head, table = (one if isinstance(one, torch.Tensor | Blocks) else one.get_tensor(name) for name, one in found)
    if _equal(head, table):
        return config
    own = copy(config)
    own.tie_word_embeddings = False
    return own


def _equal(one: torch.Tensor | Blocks, other: torch.Tensor | Blocks) -> bool:
    if isinstance(one, Blocks) or isinstance(other, Blocks):
        both = isinstance(one, Blocks) and isinstance(other, Blocks) and one.kind == other.kind
        return both and torch.equal(one.data, other.data)
    return one.dtype == other.dtype and torch.equal(one, other)


def tuned_note(folder: str) -> str | None:
    """A sentence for reports if `paceline train jacobi` made the model; else None."""
    try:
        start = loads((Path(folder).expanduser() / TUNED_FILE).read_bytes())["tuned_from"]["name"]
    except (OSError, NotJSON, KeyError, TypeError):
        return None
    return (
        f"The model was fine-tuned with noise from {start}, so it is another model: lossless means lossless for these "
        f"weights, and {start} may answer otherwise."
    )


# Its weights ---------------------------------------------------------------------------------------------------------

_SAMPLE = 64
"""How many numbers of a tensor a fingerprint reads. Fine-tuning in bfloat16 leaves many numbers, but not all."""


def open_weights(folder: Path) -> dict[str, Any]:
    """Open the safetensors files in `folder`. Returns the file of each tensor; only headers are read. ModelError if the
    folder also has an adapter, because the model is then not complete."""
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json) beside the model's weights, and it is not clear whether "
            "they have its changes: merge it into its base model first, with peft's merge_and_unload, or remove the "
            "files of one of the two"
        )
    tensors: dict[str, Any] = {}
    for file in _weight_files(folder):
        opened = open_file(file)
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def open_file(file: Path) -> Any:
    """Open a safetensors file, reading only its header. ModelError if that fails."""
    try:
        return safe_open(file, framework="pt")
    except OSError as error:
        why = "it is a folder" if file.is_dir() else error.strerror or one_line(error)
        raise ModelError(f"{file} cannot be read as weights: {why}") from None
    except SafetensorError as error:
        refuse_pointer(file)
        raise ModelError(f"{file} is cut off or damaged ({one_line(error)}): copy or download it again") from None


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, list[int]]:
    """Shapes by name, from the headers of open files."""
    return {key: file.get_slice(key).get_shape() for key, file in tensors.items()}


def refuse_pointer(file: Path) -> None:
    """Raise ModelError if a file is a Git LFS pointer instead of weights."""
    with file.open("rb") as opened:
        if opened.read(30).startswith(b"version https://git-lfs"):
            raise ModelError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise ModelError(f"{folder / INDEX} has no weight_map")
        files = sorted({folder / Path(str(file)).name for file in index.values()})
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise ModelError(
                f"{folder} lacks {', '.join(absent)}, {len(absent)} of the {len(files)} files with its weights: "
                "copy or download the rest"
            )
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    files = [p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(("consolidated", "adapter"))]
    if not files:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".ckpt"))
        if not others:
            raise ModelError(f"{folder} has no weights: there is no .safetensors file in it")
        raise ModelError(
            f"{folder}: weights are read from safetensors only, and it has {', '.join(others[:3])}; convert with "
            f"transformers: AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('NEW_FOLDER')"
        )
    return files


def fingerprint(weights: WeightsByName) -> str:
    """16 hexadecimal digits that identify a model's weights, because a drafter is trained for one model.

    They hash the name and shape of each tensor, and a sample of its numbers, rounded to bfloat16, or of its blocks'
    bytes. So they do not depend on dtype or device."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        flat = weight.data.reshape(-1) if isinstance(weight, Blocks) else weight.detach().reshape(-1)
        few = flat[:: max(len(flat) // _SAMPLE, 1)][:_SAMPLE].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(weight.shape)}".encode() + few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
