"""VocabTrim: reduce a drafter's output head to the tokens that the target writes most (Goel et al. 2025, arXiv
2506.22694).

Every draft step reads the whole head, though most tokens are never drafted; K rows are cheaper to read. Only kept
tokens are drafted, and the target decides as always, so the output stays the target's. Tokens are counted in the
target's own responses, not in prompts or raw text (the paper's finding; FR-Spec, Zhao et al. 2025, arXiv 2502.14856,
counts raw text). See docs/draft-models.md."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.formats.tokenizer import Tokenizer
from paceline.jsonl import loads

FILE = "paceline/vocab.safetensors"
"""Path of a drafter's vocabulary in its folder. It is not beside the weights, where servers load all safetensors files.
"""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a drafter keeps.

    keep       token ids int64 [K], ascending.
    counts     how often the target wrote each token, int64 [V]; None: unknown (a map of another project).
    must       groups of tokens that are kept whatever their counts, most important first.
    tokenizer  fingerprint of the tokenizer; "": unknown.
    facts      more entries of the file's header.

    Raises MethodError if `keep` is empty, not ascending, or beyond the vocabulary."""

    keep: Tensor
    counts: Tensor | None = None
    must: Sequence[Tensor] = ()
    tokenizer: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_map(self.keep, None if self.counts is None else len(self.counts))

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that identify the map."""
        return hashlib.sha256(self.keep.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:16]

    def best(self, k: int) -> Tensor:
        """The best `k` tokens, int64 [k] ascending. MethodError if there are no counts, or fewer than `k` tokens."""
        if self.counts is None:
            raise MethodError(f"this vocabulary is a map of {len(self.keep)} tokens without counts; name it as it is")
        return most_frequent(self.counts, k, self.must)


def most_frequent(counts: Tensor, k: int, must: Sequence[Tensor] = ()) -> Tensor:
    """The `k` most frequent tokens by counts [V], int64 [k] ascending; of equal counts, the lower id.

    Groups of `must` come first, as long as they fill at most half of the places, because in a small vocabulary 256 rare
    byte tokens would replace frequent tokens. MethodError unless 1 <= k <= V."""
    if not 1 <= k <= len(counts):
        raise MethodError(f"a vocabulary of {k} tokens is asked for; the tokenizer has {len(counts)}, so 1 to that")
    score, held = counts.double().clone(), 0
    for group in must:
        held += len(group)
        if 2 * held > k:
            break
        score[group] = torch.inf
    return score.argsort(descending=True, stable=True)[:k].sort().values


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the highest token id. A model may have more rows, which are padding."""
    return max(tokenizer.inner.get_vocab().values(), default=-1) + 1


def read_vocabulary(file: Path) -> Vocabulary:
    """Read a file of `save_vocabulary`, or a safetensors file with EAGLE-3's offsets. MethodError if the file is
    missing, damaged or without a map."""
    if not file.is_file():
        raise MethodError(f"there is no vocabulary file {file}; `paceline train tools vocab` makes one")
    try:
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            wanted = {n for n in names if n in ("keep", "counts", OFFSETS, MEMBERS) or n.startswith("must.")}
            tensors = {name: opened.get_tensor(name) for name in sorted(wanted)}
            header: dict[str, Any] = loads((opened.metadata() or {}).get("paceline", "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise MethodError(f"{file} cannot be read as a vocabulary ({error}); make it again") from None
    if "keep" not in tensors and OFFSETS not in tensors:
        raise MethodError(f"{file} is not a vocabulary: it has neither keep (token ids) nor {OFFSETS} (EAGLE-3's ids)")
    try:
        if "keep" in tensors:
            must = [tensors[name] for name in sorted(tensors) if name.startswith("must.")]
            tokenizer = header.pop("tokenizer", "")
            vocabulary = Vocabulary(tensors["keep"].long(), tensors.get("counts"), must, tokenizer, header)
        else:
            vocabulary = Vocabulary(from_offsets(tensors[OFFSETS].long(), tensors.get(MEMBERS)))
    except MethodError as error:
        raise MethodError(f"{file}: {error}") from None
    if "hash" in header and header.pop("hash") != vocabulary.hash:
        raise MethodError(f"{file}: its token ids are not those its hash was made of; make it again")
    return vocabulary


def kept_tokens(vocab: str, checkpoint: str | Path, target: Facts) -> Tensor:
    """The tokens that the option `vocab` keeps: int64 [K] on the target's device, ascending.

    vocab  a number K: the best K by the counts in the drafter's `checkpoint`; or a vocabulary file.

    MethodError if the file is missing or for another tokenizer, or K is larger than the vocabulary."""
    file = Path(checkpoint).expanduser() / FILE if vocab.isdecimal() else Path(vocab).expanduser()
    if vocab.isdecimal() and not file.is_file():
        raise MethodError(
            f"vocab={vocab} needs counts of what the target writes, and there is no {file}: make it with `paceline "
            f"train tools vocab TARGET --generate 1000 --out {Path(checkpoint)}`, or name a file: vocab=FILE"
        )
    known = read_vocabulary(file)
    of = target.tokenizer.fingerprint if target.tokenizer is not None else ""
    if known.tokenizer and of and known.tokenizer != of:
        whose = known.facts.get("tokenizer_name", known.tokenizer)
        raise MethodError(f"{file} is a vocabulary of another tokenizer ({whose}): its ids mean other text here")
    keep = known.best(int(vocab)) if vocab.isdecimal() else known.keep
    check_map(keep, target.vocab_size, f"{file}: the vocabulary map")
    return keep.to(target.device)


def kept_rows(own: Tensor | None, vocab: str, checkpoint: str | Path, target: Facts) -> tuple[Tensor, Tensor]:
    """Select the rows of a head that the option `vocab` keeps. Returns rows, and their tokens, int64 [n] each.

    own  int64 [K], the token of each row; None: row = token.

    MethodError if no row is left, or as in `kept_tokens`."""
    keep = kept_tokens(vocab, checkpoint, target)
    if own is None:
        return keep, keep
    own = own.to(keep.device)
    rows = torch.isin(own, keep).nonzero().flatten()
    if not len(rows):
        raise MethodError(f"vocab={vocab}: none of these tokens is one that {checkpoint} drafts")
    return rows, own[rows]


# The map of a draft vocabulary, as EAGLE-3's authors write it ---------------------------------------------------------

OFFSETS, MEMBERS = "d2t", "t2d"
"""EAGLE-3's names of two tensors: d2t[column] = token id - column of each kept token, and t2d[id] = is it kept."""


def check_map(keep: Tensor, vocab_size: int | None = None, where: str = "the vocabulary map") -> None:
    """Raise MethodError unless `keep` has one or more token ids, ascending, below `vocab_size`."""
    if keep.ndim != 1 or not len(keep):
        raise MethodError(f"{where} is empty; it needs at least one token")
    if bool((keep[1:] <= keep[:-1]).any()) or int(keep[0]) < 0:
        raise MethodError(f"{where} is not sorted: token ids must ascend, each of them once")
    if vocab_size is not None and int(keep[-1]) >= vocab_size:
        raise MethodError(f"{where} has token {int(keep[-1])}; the tokens are 0 to {vocab_size - 1}")


def from_offsets(offsets: Tensor, members: Tensor | None, where: str = "the vocabulary map") -> Tensor:
    """Token ids of EAGLE-3's map. Offsets that are all 0 mean the first K tokens. MethodError as in `check_map`."""
    keep = offsets + torch.arange(len(offsets))
    check_map(keep, None if members is None else len(members), where)
    if members is not None and not torch.equal(members.bool().nonzero().flatten(), keep):
        raise MethodError(f"{where}: {OFFSETS} and {MEMBERS} disagree about which tokens are kept")
    return keep


def to_offsets(keep: Tensor, size: int) -> dict[str, Tensor]:
    """EAGLE-3's map of the tokens `keep` int64 [K] out of `size`, as tensors of a file; no tensors if all are kept."""
    members = torch.zeros(size, dtype=torch.bool, device=keep.device)
    members[keep] = True
    offsets = keep - torch.arange(len(keep), device=keep.device)
    return {} if len(keep) == size else {OFFSETS: offsets, MEMBERS: members}


def columns_of(path: str, tensors: Mapping[str, Tensor], vocab: int, target: Facts) -> Tensor | None:
    """The target's ids int64 [vocab] of a draft vocabulary; None: all tokens. MethodError if they do not fit the
    target."""
    if type(vocab) is not int or not 1 <= vocab <= target.vocab_size:
        raise MethodError(f"{path} drafts {vocab!r} tokens of {target.name}, which has {target.vocab_size}")
    if OFFSETS not in tensors and vocab == target.vocab_size:
        return None
    offsets = tensors.get(OFFSETS, torch.zeros(vocab, dtype=torch.int64)).long()
    keep = from_offsets(offsets, tensors.get(MEMBERS), f"{path}: the vocabulary map")
    if len(keep) != vocab or int(keep[-1]) >= target.vocab_size:
        raise MethodError(
            f"{path} drafts {vocab} tokens, with ids for {len(keep)} up to {int(keep[-1])}; {target.name} has "
            f"{target.vocab_size}: it is a head for another target"
        )
    return None if vocab == target.vocab_size else keep.to(target.device)
