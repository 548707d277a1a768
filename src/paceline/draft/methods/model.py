"""model: any causal model drafts for the target (speculative decoding with a draft model).

Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318). The draft model runs like a target, with
its own cache (`draft_model.py`); the loop is `Chain` (`proposers.py`). A forward takes the time to read its weights or,
on a fast accelerator, to launch its layers' kernels. It has the target's tokenizer, or its own (`tokenizers.py`).

    Engine("smollm2", draft="model:DRAFT,stop=svip")
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from paceline.core.options import option, quoted
from paceline.draft.models.draft_model import DraftModel, TextModel
from paceline.draft.models.model_drafter import ModelDrafter, ModelDrafterConfig
from paceline.draft.models.proposers import Proposer
from paceline.errors import MethodError, ModelError
from paceline.formats.facts import Facts
from paceline.formats.heads.checkpoint import check_target, recorded_target
from paceline.formats.tokenizer import Tokenizer
from paceline.target.base import Target
from paceline.target.load import has_tokenizer, load, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelDrafterConfig):
    """Options of drafters with a draft model."""

    checkpoint: str = option(help="folder or hub id of the draft model")
    dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"] = option(
        "auto",
        "dtype of the draft model's weights; auto: the target's. int8 and int4 read less memory and change drafts a "
        "little",
    )
    context: int | None = option(
        None, "most tokens of a text that the draft model reads at once, its last ones; none: the whole text", least=1
    )


@dataclass(frozen=True, kw_only=True)
class OwnTokenizerConfig(ModelConfig):
    """Options of `model`."""

    tokenizer: Literal["target", "own", "tli", "slem"] = option(
        "target",
        "tokenizer of the draft model: the target's, or its own; tli: draft tokens that both have; slem: draft text",
    )


class Model(ModelDrafter):
    """Drafts with another model, usually a smaller one of the target's family."""

    name = "model"
    paper = "Leviathan et al. 2023, Speculative Decoding, arXiv 2211.17192"
    Config: ClassVar[type[Any] | None] = OwnTokenizerConfig
    config: OwnTokenizerConfig

    def open(self, target: Facts) -> DraftModel:
        """Load the draft model. MethodError if it has a tokenizer that the options do not allow."""
        config, own = self.config, own_tokenizer(self.config, target)
        network = load_network(config, target)
        if own is not None:
            from paceline.draft.models.tokenizers import across_tokenizers

            translated = across_tokenizers(config.checkpoint, config.tokenizer, config.context, network, own, target)
            way, more = ("slem", ", and drafts no tree") if translated.bridge.drafts_text else ("tli", "")
            if config.vocab is not None or (more and config.tree):
                raise MethodError(f"tokenizer={way} takes no vocab{more}")
            return translated
        columns = trim(network, config, target)
        return TextModel(network, target.vocab_size, columns, context=config.context)

    def proposer_of(self, model: DraftModel) -> Proposer:
        from paceline.draft.models.tokenizers import Retokenized, TextDrafts

        proposer = super().proposer_of(model)
        return Retokenized(proposer, model) if isinstance(model, TextDrafts) else proposer


def load_network(config: ModelConfig, target: Facts) -> Target:
    """Load the draft model. MethodError if it cannot draft for the target as the options say."""
    path = config.checkpoint
    own = f"auto-{str(target.dtype).removeprefix('torch.')}"  # A quantised draft model stays quantised.
    network = load(path, dtype=own if config.dtype == "auto" else config.dtype, device=target.device)
    if target.exact:  # Then a row's draft must not depend on its batch, either.
        with suppress(ModelError):
            network.make_exact()
    if target.tokenizer is None and network.vocab_size != target.vocab_size:
        raise MethodError(
            f"model:{path} knows {network.vocab_size} tokens and the target {target.vocab_size}: "
            "a draft model needs the target's tokenizer"
        )
    if (config.context or 0) > network.max_context:
        raise MethodError(f"context is {config.context}; {path} can read {network.max_context} tokens")
    return network


def trim(network: Target, config: ModelConfig, target: Facts) -> torch.Tensor | None:
    """Cut the output head to the tokens of the option `vocab`. Returns its rows' tokens; None: all of the target's."""
    if config.vocab is not None:
        from paceline.formats.heads.vocab import check_map, kept_tokens

        columns = kept_tokens(config.vocab, config.checkpoint, target)
        check_map(columns, network.vocab_size)
        network.trim_head(columns)
        return columns
    if network.vocab_size < target.vocab_size:  # The tokenizer is the same, but padded to fewer rows.
        return torch.arange(network.vocab_size, device=target.device)
    return None


def own_tokenizer(config: ModelConfig, target: Facts) -> Tokenizer | None:
    """The draft model's tokenizer if it is not the target's, else None. MethodError if the options say otherwise."""
    path, wanted = config.checkpoint, getattr(config, "tokenizer", "target")
    if target.tokenizer is None:
        if wanted != "target":
            raise MethodError(f"tokenizer={wanted} needs the target's tokenizer, and {target.name} has none")
        return None
    # A draft model without a tokenizer names the target for which it was trained.
    made_for = None if has_tokenizer(path) else recorded_target(path)
    if made_for is not None:
        check_target(Path(path), made_for, target, any_target=True)
        return None
    own = load_tokenizer(path)
    if wanted == "target":
        check_tokenizer(path, own, target.tokenizer)
    return None if own.fingerprint == target.tokenizer.fingerprint else own


def check_tokenizer(path: str, drafts: Tokenizer, targets: Tokenizer) -> None:
    """Raise MethodError, which says what differs, unless both tokenizers give each token the same id."""
    if drafts.fingerprint == targets.fingerprint:
        return
    own, others = drafts.inner.get_vocab(), targets.inner.get_vocab()
    moved = sum(others[token] != id for token, id in own.items() if token in others)
    only = len(own.keys() - others.keys()), len(others.keys() - own.keys())
    raise MethodError(
        f"the draft model {path} has another tokenizer than the target: {only[0]} of its {len(own)} tokens the target "
        f"does not have, {only[1]} of the target's {len(others)} it does not have, {moved} have another id; "
        f"model:{quoted(path)},tokenizer=own drafts with it"
    )
