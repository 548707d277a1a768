"""Load a Target and its Tokenizer by name or folder. Knows file formats and what can be wrong with them.

A model is a Hugging Face folder: config.json, weights in safetensors (one file or shards), tokenizer files. Nothing is
unpickled, and no code from the folder runs unless allowed. Every mistake in a folder is a ModelError of one line.

    target = load("models/demo")
    tokenizer = load_tokenizer("models/demo")
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from paceline.errors import ModelError, meant
from paceline.jsonl import loads
from paceline.target import decoder, hf
from paceline.target.base import Target
from paceline.target.checks import check_config, check_layers, check_numbers, check_shape, end_tokens, refuse_absent
from paceline.target.find import SMALL_FILES, find, gguf_of, is_gguf, name_of
from paceline.target.fingerprint import fingerprint
from paceline.target.quantised import checkpoint as quantised
from paceline.target.quantised import gguf_model
from paceline.target.quantised.gguf import GGUF
from paceline.target.quantised.gguf_tokenizer import same_tokens, tokenizer_of
from paceline.target.shape import unsupported, weight_shapes
from paceline.target.tokenizer import SentencePiece, Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json"]


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    native: bool | None = None,
    trust_remote_code: bool = False,
    exact: bool | None = None,
    threads: int | None = None,
) -> Target:
    """The model in folder `model`, or of that name on the Hugging Face hub, ready to verify.

    model may also be a GGUF file, or one on the hub, owner/name:FILE.gguf.

    dtype   "float32", "bfloat16", "float16", or "auto": the checkpoint's own, but float32 on processors that would
            only emulate it. "int8" and "int4": its matrices in blocks of eight or four bits, all else as with "auto",
            or as in "int8-float32"; on CPUs, with our decoder. A model that is in blocks already keeps them with "auto"
            ("auto-float32": all else in float32), and has them expanded with any dtype of 16 or 32 bits.
    device  "auto" (a CUDA device if there is one), or any device word of torch.
    native  True: our decoder; False: the transformers implementation; None: ours if it supports the model.
    trust_remote_code  run the code a model brings along.
    exact   True: as `Target.make_exact`; None: where that costs no time; False: never.
    threads of the processor that rounds run on; None: as many as pay (see `Threads`).

    Raises ModelError, one line, if the model cannot be found, read or used.
    """
    made = _load(model, dtype, device, native, trust_remote_code)
    if exact or (exact is None and made.exact_is_free):
        made.make_exact()
    if threads is not None:
        made.threads.fix(threads)
    return made


def _load(
    model: str | Path,
    dtype: str | torch.dtype,
    device: str | torch.device,
    native: bool | None,
    trust_remote_code: bool,
) -> Target:
    precision, rest = quantised.split(dtype)
    to, wanted = device_named(device), _dtype(rest)
    makes = precision in quantised.WORDS
    if is_gguf(model):
        path = gguf_of(model)
        return _load_file(path, wanted, precision, _cpu(path.name, device) if precision else to, native)
    name, folder = name_of(model), find(model, [*SMALL_FILES, "*.safetensors"])
    config = read_config(folder, trust_remote_code)
    check_config(config, folder / "config.json")
    tensors = open_weights(folder)
    ours = quantised.is_ours(config)
    if makes or (ours and precision):
        to = _cpu(name, device)
    wanted = wanted or _own_dtype(config, tensors, to)
    ends = _eos_token_ids(folder, config)
    reason = _not_native(config)
    if makes and (reason or native is False):
        why = reason or "native=False asks for another"
        raise ModelError(f"{name}: {precision} weights are made by the native decoder only, and {why}")
    if native and reason:
        raise ModelError(f"{name}: the native decoder cannot run it, {reason}; native=None uses transformers")
    if getattr(config, "quantization_config", None) is None:
        check_numbers(folder, [key for key in tensors if key.endswith(".weight")], tensors)
    if native is False or reason:
        made: Target = hf.load(
            folder, name=name, dtype=wanted, device=to, eos_token_ids=ends, trust_remote_code=trust_remote_code
        )
    else:
        made = _load_native(folder, name, config, tensors, wanted, to, ends, precision)
    if any((folder / file).exists() for file in (*TOKENIZER_FILES, "tokenizer.model")):
        made.tokenizer = _tokenizer_in(folder, name, trust_remote_code)
    return made


def _load_native(
    folder: Path,
    name: str,
    config: PretrainedConfig,
    tensors: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    ends: Sequence[int],
    precision: str | None,
) -> Target:
    check_layers(folder, config.num_hidden_layers, tensors)
    if quantised.is_ours(config):
        blocks, made_from = quantised.read(folder, config, tensors)
        quantised.refuse_word(name, quantised.describe(blocks), precision or "")
    else:
        weights = native_weights(folder, config, tensors)
        made_from = fingerprint(weights)
        blocks = quantised.quantised(weights, precision) if precision in quantised.WORDS else {**weights}
    made = decoder.Decoder(
        config, blocks, name=name, dtype=dtype, device=device, eos_token_ids=ends, weights_fingerprint=made_from,
        expand=precision is None,
    )  # fmt: skip
    made.measured = quantised.measured(folder)
    return made


def _load_file(
    path: Path,
    dtype: torch.dtype | None,
    precision: str | None,
    device: torch.device,
    native: bool | None,
) -> Target:
    if native is False:
        raise ModelError(f"{path} is a GGUF file, which only the native decoder runs")
    made = gguf_model.load_gguf(path, dtype=dtype, precision=precision, device=device)
    with suppress(ModelError):  # without one it still takes token ids
        made.tokenizer = load_tokenizer(path)
    return made


def native_weights(folder: Path, config: PretrainedConfig, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that the native decoder reads, mapped, not yet read. ModelError if one is missing or of another
    shape."""
    shapes = weight_shapes(config)
    check_shapes(folder, shapes, tensors)
    return {key: tensors[key].get_tensor(key) for key in shapes}


def quantise_folder(model: str | Path, out: str | Path, precision: str) -> int:
    """Write `model` with weights of `precision`, "int8" or "int4", to the new folder `out`, which `load` reads like any
    other; returns the bytes of its weights. Raises PacelineError, one line, if it cannot be read or written."""
    name, folder = name_of(model), find(model, [*SMALL_FILES, "*.safetensors"])
    config = read_config(folder)
    if reason := _not_native(config) or ("its weights are in blocks already" if quantised.is_ours(config) else None):
        raise ModelError(f"{name} cannot be quantised: {reason}")
    weights = native_weights(folder, config, open_weights(folder))
    return quantised.write(folder, Path(out).expanduser(), config, weights, precision)


def load_tokenizer(model: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model, found as `load` finds it; of a folder with a tokenizer alone; or of a SentencePiece
    file (tokenizer.model, which needs the package sentencepiece).

    Of a GGUF file it is the one beside it, if that has the file's tokens, else the file's own, rebuilt.

    Raises ModelError if there is no tokenizer, or if it has tokens that the model in the folder does not know."""
    if is_gguf(model):
        opened = GGUF(gguf_of(model))
        if any((opened.path.parent / name).exists() for name in TOKENIZER_FILES):
            beside = _tokenizer_in(opened.path.parent, opened.path.stem, trust_remote_code)
            if same_tokens(beside, opened, all_of_them=True):
                return beside
        return tokenizer_of(opened, opened.path.stem)
    if (file := Path(model).expanduser()).is_file() and file.suffix == ".model":
        return Tokenizer(_sentencepiece(file), str(model))
    return _tokenizer_in(find(model, SMALL_FILES), name_of(model), trust_remote_code)


def tokenizer_for(model: str | Path, tokenizer: str | Path) -> Tokenizer:
    """The tokenizer named `tokenizer`, for `model`. ModelError if `model` is a GGUF file with other tokens."""
    named = load_tokenizer(tokenizer)
    if is_gguf(model) and not same_tokens(named, GGUF(gguf_of(model)), all_of_them=False):
        raise ModelError(f"the tokenizer {tokenizer} has other tokens than {model}: it is another model's")
    return named


def _tokenizer_in(folder: Path, name: str, trust_remote_code: bool) -> Tokenizer:
    if _has_only_sentencepiece(folder):
        return Tokenizer(_sentencepiece(folder / "tokenizer.model"), name)
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    try:
        inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # third-party parsers of many formats may raise anything
        raise ModelError(f"the tokenizer in {folder} cannot be read: {hf.one_line(error)}") from error
    inner.model_max_length = sys.maxsize  # the engine knows the context; transformers would only warn, once
    tokenizer = Tokenizer(inner, name)
    if (folder / "config.json").exists():
        known = getattr(read_config(folder, trust_remote_code).get_text_config(), "vocab_size", None)
        highest = max(inner.get_vocab().values(), default=0)
        if known is not None and highest >= known:
            raise ModelError(
                f"the tokenizer in {folder} has token ids up to {highest} but the model knows only 0 to {known - 1}: "
                "they are of different models, or the embeddings were not resized when tokens were added"
            )
    return tokenizer


def _has_only_sentencepiece(folder: Path) -> bool:
    """Whether a folder holds a SentencePiece file and nothing that transformers could make a tokenizer of."""
    known = ["config.json", "tokenizer_config.json", *TOKENIZER_FILES]
    return [name for name in known if (folder / name).exists()] == ["tokenizer.model"]


def _sentencepiece(file: Path) -> SentencePiece:
    try:
        import sentencepiece
    except ImportError as error:
        raise ModelError(
            f"{file} is a SentencePiece file, and the package that reads it is not installed: "
            "pip install sentencepiece, or name a folder with a tokenizer.json"
        ) from error
    try:
        return SentencePiece(sentencepiece.SentencePieceProcessor(model_file=str(file)))
    except (RuntimeError, OSError) as error:
        raise ModelError(f"{file} cannot be read as a SentencePiece model: {hf.one_line(error)}") from error


def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """config.json of `folder`, read by transformers."""
    file = folder / "config.json"
    if not file.exists():
        inside = sorted(p.parent.name for p in folder.glob("*/config.json"))
        hint = f" Did you mean {folder / inside[-1]}?" if inside else ""
        if (folder / "adapter_config.json").exists():
            hint = " It holds an adapter: merge it into its base model first."
        raise ModelError(f"{folder} has no config.json, so it is not a model folder.{hint}")
    if "model_type" not in _read_json(file):
        raise ModelError(f"{file} has no model_type: it is not the configuration of a transformers model")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        model_type = _read_json(file)["model_type"]
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            hint = "it needs code from its own folder; pass trust_remote_code=True if you trust it"
        elif model_type not in transformers.CONFIG_MAPPING:
            hint = f"transformers {transformers.__version__} does not know model type {model_type!r}"
        else:
            hint = hf.one_line(error)
        raise ModelError(f"{file} cannot be used: {hint}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {hf.one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object, not a {type(value).__name__}")
    return value


def _eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Tokens that end an answer: those of config.json and of generation_config.json together."""
    own = getattr(config.get_text_config(), "eos_token_id", None)
    generation = folder / "generation_config.json"
    texts = _read_json(generation) if generation.exists() else {}
    return tuple(sorted(end_tokens(own, folder / "config.json") | end_tokens(texts.get("eos_token_id"), generation)))


def _dtype(word: str | torch.dtype) -> torch.dtype | None:
    """None for "auto"."""
    if word == "auto":
        return None
    if word in DTYPES.values():
        return word  # type: ignore[return-value]
    if word not in DTYPES:
        known = (*DTYPES, *quantised.WORDS)
        raise ModelError(f"unknown dtype {str(word)!r}; there are auto, {', '.join(known)}.{meant(str(word), known)}")
    return DTYPES[word]


def device_named(word: str | torch.device) -> torch.device:
    """The device of that name, or the best one for "auto"; ModelError for one that cannot compute here."""
    if word == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(word)
        torch.ones(1, device=device).sum().item()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, ImportError) as error:  # AssertionError: torch built without it
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ModelError(
            f"device {str(word)!r} cannot be used; this machine has {', '.join(['cpu', *cuda])}"
        ) from error
    return device


def _cpu(name: str, word: str | torch.device) -> torch.device:
    """The CPU, where weights in blocks are multiplied; ModelError if another device is asked for."""
    if str(word) not in ("auto", "cpu"):
        raise ModelError(
            f"{name}: weights of eight and four bits run on CPUs, not on {word}: --device cpu, or "
            "a dtype of 16 or 32 bits"
        )
    return torch.device("cpu")


def _own_dtype(config: PretrainedConfig, tensors: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """The checkpoint's dtype, or float32 where the processor has no units for it."""
    own = getattr(config, "dtype", None) or next(
        (t.dtype for t in (f.get_tensor(key) for key, f in tensors.items()) if t.is_floating_point()), torch.float32
    )
    if device.type == "cpu" and not _has_units(own):
        return torch.float32
    return own


def _has_units(dtype: torch.dtype) -> bool:
    """Whether this processor computes with `dtype`."""
    if dtype == torch.float32 or not torch.backends.mkldnn.is_available():
        return dtype == torch.float32
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype in supported and bool(supported[dtype]())


def _not_native(config: PretrainedConfig) -> str | None:
    if getattr(config, "quantization_config", None) is not None and not quantised.is_ours(config):
        return "its weights are quantized"
    return unsupported(config)


def open_weights(folder: Path) -> dict[str, Any]:
    """The open safetensors file of every tensor in `folder`; only headers are read."""
    tensors: dict[str, Any] = {}
    for file in _weight_files(folder):
        try:
            opened = safe_open(file, framework="pt")
        except OSError as error:
            why = "it is a folder" if file.is_dir() else error.strerror or hf.one_line(error)
            raise ModelError(f"{file} cannot be read as weights: {why}") from error
        except SafetensorError as error:
            with file.open("rb") as raw:
                pointer = raw.read(30).startswith(b"version https://git-lfs")
            hint = "is a Git LFS pointer, not the weights: run `git lfs pull`"
            broken = f"is cut off or damaged ({hf.one_line(error)}): copy or download it again"
            raise ModelError(f"{file} {hint if pointer else broken}") from error
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


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


def check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    """ModelError unless every tensor that the configuration asks for is there, with the right shape."""
    refuse_absent(folder, [key for key in shapes if key not in tensors])
    for key, shape in shapes.items():
        check_shape(folder, key, tensors[key].get_slice(key).get_shape(), shape)
