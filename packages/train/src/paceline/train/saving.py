"""Writing what was trained: drafters' folders and vocabularies, whole or not at all.

    save_drafter(out, "kind", config={"exit": 2, "recipe": {...}}, tensors=tensors, target=TargetFacts.of(target))
    save_vocabulary(out / FILE, Vocabulary(keep, counts, must_keep(tokenizer, ends)))

`paceline.formats.heads.checkpoint` and `vocab` read them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from paceline import __version__
from paceline.errors import PacelineError, install
from paceline.formats.adapter import CONFIG as ADAPTER_CONFIG
from paceline.formats.adapter import WEIGHTS as ADAPTER
from paceline.formats.heads.checkpoint import BLOCKS, CONFIG, KIND, WEIGHTS, TargetFacts
from paceline.formats.heads.vocab import Vocabulary, vocab_size
from paceline.formats.tokenizer import Tokenizer
from paceline.kernels.blocks import Blocks, WeightsByName
from paceline.outputs import replacing, write_whole


def save_drafter(out: Path, kind: str, *, config: dict[str, Any], tensors: WeightsByName, target: TargetFacts) -> None:
    """Write a drafter into the folder `out`, as `save_folder` does. config.json names the matrices in blocks."""
    blocks = {name: w for name, w in tensors.items() if isinstance(w, Blocks)}
    plain = {name: w.data if isinstance(w, Blocks) else w for name, w in tensors.items()}
    formats = {BLOCKS: {name: w.kind.name for name, w in blocks.items()}} if blocks else {}
    save_folder(out, {KIND: kind, "paceline": __version__, "target": asdict(target), **config, **formats}, plain)


def save_folder(out: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and the weights into the folder `out`; other files in it stay.

    A kill leaves the old checkpoint, or one without config.json, which is refused: never half of either."""
    text = json.dumps(config, indent=2) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / WEIGHTS) as temporary:
        save_tensors(temporary, tensors, {"format": "pt"})
        (out / CONFIG).unlink(missing_ok=True)
    write_whole(out / CONFIG, text)


def save_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """`save_file`, but a full disk raises OSError."""
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    file.chmod(0o644)  # safetensors lets only the owner read.


# Adapters --------------------------------------------------------------------------------------------------------


def with_adapters(network: Any, rank: int, norms: bool = False) -> Any:
    """Add LoRA adapters to every matrix of the layers of `network`, and freeze its other weights, but norms if they
    are to learn whole."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise PacelineError(f"--lora needs the package peft; {install('packages/train')}") from None
    whole = ["norm"] if norms else None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", modules_to_save=whole)
    return get_peft_model(network, config)


def adapter_tensors(adapted: Any) -> dict[str, Tensor]:
    """Copies of an adapter's tensors in a network, by peft's names."""
    from peft import get_peft_model_state_dict

    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(adapted).items()}


def drop_adapter(out: Path) -> None:
    """Delete the adapter that an earlier training wrote into the folder `out`."""
    for name in (ADAPTER, ADAPTER_CONFIG):
        (out / name).unlink(missing_ok=True)


def save_adapter(out: Path, config: Any, tensors: Mapping[str, Tensor], target: str | Path, dtype: torch.dtype) -> None:
    """Write an adapter in peft's layout into the folder `out`; config is peft's, `target` the base."""
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / ADAPTER) as file:
        save_tensors(file, {name: tensor.to(dtype) for name, tensor in tensors.items()}, {"format": "pt"})
    (out / WEIGHTS).unlink(missing_ok=True)  # An earlier training may have written a whole model.
    base = Path(target).expanduser()
    config.base_model_name_or_path = str(base.resolve() if base.exists() else target)
    config.inference_mode = True
    config.save_pretrained(out)


# Vocabularies ----------------------------------------------------------------------------------------------------


def save_vocabulary(file: Path, vocabulary: Vocabulary) -> None:
    """One safetensors file; it appears whole or not at all."""
    tensors = {"keep": vocabulary.keep.contiguous()}
    if vocabulary.counts is not None:
        tensors["counts"] = vocabulary.counts.contiguous()
    tensors |= {f"must.{i}": group.contiguous() for i, group in enumerate(vocabulary.must) if len(group)}
    header = {"tokenizer": vocabulary.tokenizer, "hash": vocabulary.hash, **vocabulary.facts}
    with replacing(file) as temporary:
        save_tensors(temporary, tensors, {"paceline": json.dumps(header)})


def coverage(counts: Tensor, keep: Tensor) -> float:
    """Share of the counted tokens [V] that are kept: an upper bound on the acceptance rate of this text."""
    return float(counts[keep].sum() / counts.sum().clamp_min(1))


_SPACES = str.maketrans({"▁": " ", "Ġ": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r"})
"""White space as tokenizers spell it."""


def must_keep(tokenizer: Tokenizer, ends: Sequence[int]) -> list[Tensor]:
    """Tokens to keep whatever their counts: (1) end tokens, without which every response would end with a rejection;
    (2) added tokens (turns, thinking, tool calls), single digits and white space; (3) single bytes, for the rest."""
    known = tokenizer.inner.get_vocab()
    first = {i for i in (*ends, tokenizer.eos_token_id) if i is not None and i < vocab_size(tokenizer)}
    second = set(tokenizer.inner.added_tokens_decoder)
    third = set()
    alphabet = set(ByteLevel.alphabet())
    spells_bytes = alphabet <= known.keys()
    for token, id in known.items():
        text = token.translate(_SPACES)
        if text.isspace() or (len(text.strip()) == 1 and text.strip() in "0123456789"):
            second.add(id)
        elif (spells_bytes and token in alphabet) or (len(token) == 6 and token.startswith("<0x")):
            third.add(id)
    groups = [sorted(first), sorted(second - first), sorted(third - second - first)]
    return [torch.tensor(group, dtype=torch.int64) for group in groups]
