"""The map of a draft vocabulary that is smaller than the target's, as EAGLE-3's authors write it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.errors import MethodError
from paceline.target.base import Facts

OFFSETS, MEMBERS = "d2t", "t2d"
"""EAGLE-3's names of two tensors: the id minus the column of every kept token, and whether every token is kept."""


def check_map(keep: Tensor, vocab_size: int | None = None, where: str = "the vocabulary map") -> None:
    """MethodError unless `keep` holds one or more token ids, ascending, below `vocab_size`."""
    if keep.ndim != 1 or not len(keep):
        raise MethodError(f"{where} is empty; it needs at least one token")
    if bool((keep[1:] <= keep[:-1]).any()) or int(keep[0]) < 0:
        raise MethodError(f"{where} is not sorted: token ids must ascend, each of them once")
    if vocab_size is not None and int(keep[-1]) >= vocab_size:
        raise MethodError(f"{where} has token {int(keep[-1])}; the tokens are 0 to {vocab_size - 1}")


def from_offsets(offsets: Tensor, members: Tensor | None, where: str = "the vocabulary map") -> Tensor:
    """Token ids of EAGLE-3's map. If all offsets are 0, those are the first K tokens. MethodError as `check_map`."""
    keep = offsets + torch.arange(len(offsets))
    check_map(keep, None if members is None else len(members), where)
    if members is not None and not torch.equal(members.bool().nonzero().flatten(), keep):
        raise MethodError(f"{where}: {OFFSETS} and {MEMBERS} disagree about which tokens are kept")
    return keep


def to_offsets(keep: Tensor, size: int) -> dict[str, Tensor]:
    """EAGLE-3's map of the tokens `keep` int64 [K] out of `size`, as tensors of a file; none if all are kept."""
    members = torch.zeros(size, dtype=torch.bool, device=keep.device)
    members[keep] = True
    offsets = keep - torch.arange(len(keep), device=keep.device)
    return {} if len(keep) == size else {OFFSETS: offsets, MEMBERS: members}


def columns_of(path: str, tensors: Mapping[str, Tensor], vocab: int, target: Facts) -> Tensor | None:
    """The target's ids int64 [vocab] of a draft vocabulary; None for all. MethodError if they are not the target's."""
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
