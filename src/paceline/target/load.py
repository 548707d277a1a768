"""Load a Target and its Tokenizer from a folder, the hub or a GGUF file. Every fault is a ModelError of one line.

A model is a Hugging Face folder: config.json, weights in safetensors (one file or shards), tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from paceline.core import rules
from paceline.errors import ModelError, PacelineError
from paceline.formats import checks
from paceline.formats import folder as files
from paceline.formats.adapter import MERGE, Adapter
from paceline.formats.checkpoint import Checkpoint
from paceline.formats.experts import Piece, pieces, renamed, stacked_in
from paceline.formats.folder import INDEX, METHOD, open_weights, read_config
from paceline.formats.heads.mtp import head_names
from paceline.formats.place import SMALL_FILES, find, gguf_of, is_gguf, is_packaged, name_of
from paceline.formats.precision import Precision, in_precision, multipliable, quantised, round_inputs
from paceline.formats.shape import ROUTER, weight_shapes
from paceline.formats.tokenizer import Tokenizer
from paceline.formats.tokenizer_files import has_tokenizer, tokenizer_in, tokenizer_of
from paceline.formats.tokenizer_files import load_tokenizer as load_tokenizer
from paceline.formats.tokenizer_files import tokenizer_for as tokenizer_for
from paceline.jsonl import NotJSON, loads
from paceline.kernels.blocks import KINDS, Blocks, Weights
from paceline.kernels.linear import has_units
from paceline.moved import aliases
from paceline.target.base import Target
from paceline.target.decoder import Decoder

if TYPE_CHECKING:
    pass

TEXT_PARTS = dict.fromkeys(
    ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "gemma4", "gemma4_text"), "model.language_model."
)  # fmt: skip
"""Families that also read images, and the prefix of their text models' tensors. Only the text models run."""
MEASURED = "quality.json"
"""File in a model folder with the result of `paceline quality --save`."""


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    native: bool | None = None,
    trust_remote_code: bool = False,
    exact: bool | None = None,
    threads: int | None = None,
    activations: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Target:
    """Load a model, ready to verify.

    model    a folder, a name on the Hugging Face hub, a GGUF file, also on the hub (owner/name:FILE.gguf), "smollm2"
             (in an installed package), or a folder with a LoRA adapter (`Adapter`), which names its base model.
    dtype    "float32", "bfloat16", "float16", or "auto": the checkpoint's own, but float32 on processors that would
             only emulate it. "int8" and "int4" quantise matrices to blocks of eight or four bits, on CPUs and for our
             decoder; the rest is as with "auto", or in a dtype that is appended ("int8-float32"). A model in blocks
             keeps them with "auto" or "auto-float32", and a dtype of 16 or 32 bits expands them.
    device   "auto" (a CUDA device if there is one), or a device name of torch.
    native   True: our decoder; False: transformers' implementation; None: our decoder if it supports the model.
    trust_remote_code  run code from the model's folder.
    exact    True: call `Target.make_exact`; None: only if it costs no time; False: never.
    threads  processor threads of a round; None: chosen by measured time (`Threads`).
    activations  bits, 8 or 16, of the rounded inputs of products with quantised weights. None: 16 if that takes
             little more time, else 8 (docs/quantised.md). With 16, "auto" computes all else in float32, and nearly all
             answers equal those of the same weights in float32.
    tokenizer    the model's tokenizer; None: the tokenizer beside its weights, if any.

    Raises ModelError, with a message of one line, if the model cannot be found, read or used."""
    precision, to = Precision.of(dtype, activations), device_named(device)
    adapter = None if is_gguf(model) else Adapter.of(model)
    if adapter is not None:
        model = adapter.base
        tokenizer = tokenizer or (load_tokenizer(adapter.folder) if has_tokenizer(adapter.folder) else None)
    if is_gguf(model):
        path = gguf_of(model)
        if dtype == "auto" and is_packaged(model) and to.type != "cpu":
            precision = replace(precision, weights=None)  # Blocks run only on CPUs.
        to = _cpu(path.name, device) if precision.weights else to
        made: Target = _load_file(path, precision, to, native, tokenizer, adapter)
    else:
        made = _load_folder(model, precision, device, to, native, trust_remote_code, tokenizer, adapter)
    if adapter is not None:
        made.name, made.folder, made.brings_head = adapter.name, adapter.folder, False
    if exact or (exact is None and made.exact_is_free):
        made.make_exact()
    if threads is not None:
        made.threads.fix(threads)
    return made


def build(checkpoint: Checkpoint, precision: Precision, device: torch.device) -> Decoder:
    """Build the decoder of a checkpoint. ModelError if the checkpoint cannot have this precision."""
    name, remarks = checkpoint.name, [*checkpoint.remarks]
    weights, made_of = in_precision(name, checkpoint.weights, precision.weights)
    if precision.weights == "auto":
        weights, held = multipliable(weights)
        remarks = [held, *remarks] if held else remarks
    in_blocks = {} if precision.weights is None else weights
    dtype = precision.rest
    if round_inputs(name, in_blocks, precision.activations, dtype) == 16:
        dtype = dtype or torch.float32
    made = Decoder(
        checkpoint.config,
        weights,
        name=name,
        dtype=dtype or checkpoint.dtype or _dtype_of(weights),
        device=device,
        eos_token_ids=checkpoint.ends,
        weights_fingerprint=checkpoint.made_from,
        made_of=made_of,
        inverse_frequencies=checkpoint.inverse_frequencies,
        expand=precision.weights is None,
        remarks=remarks,
        spend=True,
    )
    made.sampling = checkpoint.sampling
    return made


def _load_folder(
    model: str | Path, precision: Precision, device: str | torch.device, to: torch.device, native: bool | None,
    trust_remote_code: bool, tokenizer: Tokenizer | None, adapter: Adapter | None,
) -> Target:  # fmt: skip
    name, folder, config, tensors = _opened(model, trust_remote_code)
    if precision.makes_blocks or (files.quantisation(config) and precision.weights):
        to = _cpu(name, device)
    elif files.has_blocks_of_experts(config) and to.type != "cpu":
        precision = replace(precision, weights=None)  # Blocks run only on CPUs.
    dtype, ends = precision.rest or _own_dtype(config, tensors, to), files.eos_token_ids(folder, config)
    reason = _not_native(config)
    _check_native(name, native, reason, precision, adapter)
    checks.check_formats(folder, config, files.quantisation(config), tensors)
    generation = folder / "generation_config.json"
    sampling = files.sampling(files.read_json(generation), generation) if generation.exists() else {}
    if native is False or reason:
        from paceline.target import hf

        made: Target = hf.load(
            folder, name=name, dtype=dtype, device=to, eos_token_ids=ends, trust_remote_code=trust_remote_code
        )
        made.sampling = sampling
    else:
        config = files.untied(config, tensors)
        weights, made_from, remarks = _weights(folder, config, tensors, precision)
        own = Checkpoint(name, config, weights, ends, made_from, dtype, sampling=sampling, remarks=remarks)
        made = build(own.merged(adapter), precision, to)
    made.folder, made.brings_head = folder, bool(head_names(tensors))
    if tokenizer is not None or has_tokenizer(folder):
        made.tokenizer = tokenizer or tokenizer_in(folder, name, trust_remote_code)
    return made


def _check_native(
    name: str, native: bool | None, reason: str | None, precision: Precision, adapter: Adapter | None
) -> None:
    """Raise ModelError if the native decoder must run the model but cannot. reason: why it cannot; None: it can."""
    if native and reason:
        raise ModelError(f"{name}: the native decoder cannot run it, {reason}; native=None uses transformers")
    if native is not False and not reason:
        return
    why = reason or "native=False asks for another"
    if precision.makes_blocks:
        raise ModelError(f"{name}: {precision.weights} weights are made by the native decoder only, and {why}")
    if adapter:
        raise ModelError(f"{adapter.folder}: only the native decoder merges adapters, and {why}: {MERGE}")
    if precision.activations is not None:
        raise ModelError(f"{name} runs in transformers, which rounds no activations; leave activations out")


def _weights(
    folder: Path, config: PretrainedConfig, tensors: Mapping[str, Any], precision: Precision
) -> tuple[Weights, str, list[str]]:
    """Read the weights in a folder. Returns weights, their fingerprint before quantising, and remarks on them."""
    if files.quantisation(config):
        weights, made_from = read_blocks(folder, config, tensors)
        return weights, made_from, [] if precision.makes_blocks else _measured(folder)
    weights = {**native_weights(folder, config, tensors)}
    return weights, files.fingerprint(weights), []


def _load_file(
    path: Path, precision: Precision, device: torch.device, native: bool | None, tokenizer: Tokenizer | None,
    adapter: Adapter | None,
) -> Target:  # fmt: skip
    if native is False:
        raise ModelError(f"{path} is a GGUF file, which only the native decoder runs")
    from paceline.formats.gguf import checkpoint_of
    from paceline.formats.gguf_file import GGUF
    from paceline.formats.heads.gguf import first_head

    file = GGUF(path)
    checkpoint = checkpoint_of(file)
    with suppress(ModelError):  # Without a tokenizer, prompts of token ids still work.
        tokenizer = tokenizer or tokenizer_of(file)
    brings_head = first_head(file) is not None
    del file  # A vocabulary's texts take more memory than in the file; the weights' kernels need it.
    made = build(checkpoint.merged(adapter), precision, device)
    made.folder, made.tokenizer, made.brings_head = path, tokenizer, brings_head
    return made


def _opened(model: str | Path, trust_remote_code: bool = False) -> tuple[str, Path, PretrainedConfig, dict[str, Any]]:
    """Open the text model of a folder. Returns name, folder, configuration and open tensors."""
    name, folder = name_of(model), find(model, [*SMALL_FILES, "*.safetensors"])
    config = read_config(folder, trust_remote_code)
    checks.check_config(config, folder / "config.json")
    return name, folder, *_text_part(config, open_weights(folder))


def native_weights(folder: Path, config: PretrainedConfig, tensors: Mapping[str, Any]) -> Weights:
    """The tensors that the native decoder reads, mapped from disk. ModelError if `checks.check_shapes` fails."""
    shapes, tensors = weight_shapes(config), _with_experts_apart(tensors)
    checks.check_shapes(folder, shapes, files.shapes_of(tensors), config.num_hidden_layers)
    return {key: tensors[key].get_tensor(key) for key in shapes}


def _with_experts_apart(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Give each expert its own matrices, if the checkpoint stacks those of a layer."""
    found = pieces(files.shapes_of(tensors))
    stacks = stacked_in(found)
    made = {renamed(key): _named(file, key) for key, file in tensors.items() if key not in stacks}
    return made | {name: _Part(tensors, piece) for name, piece in found.items()}


@dataclass(frozen=True)
class _Part:
    """An open file in which a tensor is a piece of a stack."""

    tensors: Mapping[str, Any]
    piece: Piece

    def get_tensor(self, _: str) -> torch.Tensor | Blocks:
        return self.piece.of(lambda key: self.tensors[key].get_tensor(key))

    def get_slice(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(get_shape=lambda: [*self.piece.shape])


def _text_part(config: PretrainedConfig, tensors: dict[str, Any]) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Reduce configuration and tensors to the text model. Families outside TEXT_PARTS are returned unchanged."""
    start = TEXT_PARTS.get(config.model_type)
    if start is None:
        return config, tensors
    text = config.get_text_config()
    text.tie_word_embeddings = bool(config.tie_word_embeddings)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    names = {key: f"model.{key.removeprefix(start)}" if key.startswith(start) else key for key in tensors}
    return text, {names[key]: _named(file, key) for key, file in tensors.items()}


def _named(file: Any, key: str) -> Any:
    """Wrap an open file for a tensor that has another name, `key`, in it."""
    return SimpleNamespace(get_tensor=lambda _: file.get_tensor(key), get_slice=lambda _: file.get_slice(key))


def quantise_folder(model: str | Path, out: str | Path, precision: str) -> int:
    """Write `model` with weights of `precision`, "int8" or "int4", to the new folder `out`, which `load` reads. An
    adapter is merged first.

    Returns the bytes of its weights. Raises PacelineError if it cannot be read or written."""
    rules.check_precision(precision)
    adapter = Adapter.of(model)
    name, folder, config, tensors = _opened(model if adapter is None else adapter.base)
    checks.check_formats(folder, config, files.quantisation(config), tensors)
    if reason := _not_native(config) or ("its weights are in blocks already" if files.quantisation(config) else None):
        raise ModelError(f"{name} cannot be quantised: {reason}")
    config, copied = files.untied(config, tensors), [folder]
    weights: Weights = {**native_weights(folder, config, tensors)}
    if adapter is not None:
        own, weights = adapter.applied(config, weights)
        if own.num_hidden_layers != config.num_hidden_layers:
            raise ModelError(f"{adapter.name} cannot be quantised: it is an adapter of a model's first layers alone")
        copied += [adapter.folder] if has_tokenizer(adapter.folder) else []
    out, made = Path(out).expanduser(), quantised(weights, precision)
    kinds = {name: w.kind.name for name, w in made.items() if isinstance(w, Blocks)}
    if not kinds:
        raise ModelError(f"{folder}: no matrix has a width that is a multiple of 32, so there is nothing to quantise")
    values, made_from = json.loads((folder / "config.json").read_text("utf-8")), files.fingerprint(weights)
    about = {"quant_method": METHOD, "precision": precision, "kinds": kinds, "made_from": made_from}
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise PacelineError(f"{out} exists already; name a new folder") from None
    except OSError as error:
        raise PacelineError(f"{out} cannot be written: {error.strerror}") from None
    to_write = {name: w.data if isinstance(w, Blocks) else w.contiguous() for name, w in made.items()}
    try:
        (out / "config.json").write_text(json.dumps(values | {"quantization_config": about}, indent=2) + "\n", "utf-8")
        for file in (one for source in copied for one in sorted(source.iterdir())):
            if any(map(file.match, SMALL_FILES)) and file.name not in ("config.json", "adapter_config.json", INDEX):
                shutil.copyfile(file, out / file.name)
        save_file(to_write, out / "model.safetensors", {"format": "pt"})
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise PacelineError(f"{out} cannot be written: {error.strerror or error}") from None
    return sum(tensor.nbytes for tensor in to_write.values())


def read_blocks(folder: Path, config: PretrainedConfig, tensors: Mapping[str, Any]) -> tuple[Weights, str]:
    """Map the weights in a folder of `quantise_folder`. Returns them, and the fingerprint of the weights before
    quantising.

    Raises ModelError for unknown kinds, and if `check_shapes` fails."""
    method, wanted = files.quantisation(config), weight_shapes(config)
    known = {kind.name: kind for kind in KINDS.values()}
    words = {name: word for name, word in dict(method.get("kinds", {})).items() if name in wanted}
    for name, word in words.items():
        if word not in known:
            raise ModelError(f"{folder}: {name} is in blocks of kind {word!r}; there are {', '.join(known)}")
        rows, width = wanted[name]
        wanted[name] = rows, width // known[word].inputs * known[word].nbytes
    checks.check_shapes(folder, wanted, files.shapes_of(tensors), config.num_hidden_layers)
    found = {name: tensors[name].get_tensor(name) for name in wanted}
    weights = {name: Blocks(known[words[name]], data) if name in words else data for name, data in found.items()}
    return weights, str(method.get("made_from", ""))


def _measured(folder: Path) -> list[str]:
    """A sentence on the quality of the folder's model, if `paceline quality` has measured it."""
    try:
        return [str(loads((folder / MEASURED).read_bytes())["sentence"])]
    except (OSError, NotJSON, KeyError, TypeError):
        return []


def _not_native(config: PretrainedConfig) -> str | None:
    method = getattr(config, "quantization_config", None)
    if method is not None and not files.quantisation(config) and not files.has_blocks_of_experts(config):
        return "its weights are quantized"
    return checks.unsupported(config)


def device_named(word: str | torch.device) -> torch.device:
    """Parse the name of a device; "auto" is the best device here. ModelError for a device that cannot compute here."""
    if word == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(word)
        torch.ones(1, device=device).sum().item()  # This fails on "meta", which holds no numbers.
    except (RuntimeError, AssertionError, ImportError):  # A torch without CUDA raises AssertionError.
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ModelError(
            f"device {str(word)!r} cannot be used; this machine has {', '.join(['cpu', *cuda])}"
        ) from None
    return device


def _cpu(name: str, word: str | torch.device) -> torch.device:
    """Return the CPU, where weights in blocks run. ModelError if the user named another device."""
    if str(word) not in ("auto", "cpu"):
        raise ModelError(
            f"{name}: weights of eight and four bits run on CPUs, not on {word}: --device cpu, or "
            "a dtype of 16 or 32 bits"
        )
    return torch.device("cpu")


def _own_dtype(config: PretrainedConfig, tensors: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """The checkpoint's dtype, or float32 on a processor without units for it."""
    own = getattr(config, "dtype", None) or next(
        (t.dtype for t in (f.get_tensor(key) for key, f in tensors.items()) if t.is_floating_point()), torch.float32
    )
    return torch.float32 if device.type == "cpu" and not has_units(own) else own


def _dtype_of(weights: Weights) -> torch.dtype:
    matrices = [w for name, w in weights.items() if len(w.shape) > 1 and not name.endswith(f".{ROUTER}.weight")]
    narrow = all(isinstance(w, Blocks) or w.dtype == torch.bfloat16 for w in matrices)
    return torch.bfloat16 if has_units(torch.bfloat16) and narrow else torch.float32


aliases(__name__)
