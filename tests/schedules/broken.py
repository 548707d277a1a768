"""Broken shortcuts of batch speculation, written out to be caught (Zhang et al. 2025, arXiv 2510.22876, section 2).

`decode` recomputes the whole batch in every round, so that what goes wrong is the shortcut and nothing else; with no
shortcut it is right. A row is a list of cells: a token, and whether it is seen.

    masking   rejected tokens stay in the row, masked, and positions follow the place in the row
    bsp       rejected tokens and padding stay, are seen, and positions follow the place (Su et al. 2023)
    rollback  all rows keep as many tokens as the slowest, and take its own token after them
    dsd       a draft is kept up to and with its first wrong token, and padding piles up, seen (Yan et al. 2025)
    bonus     the draft's token is kept where the target's belongs, and nothing else is wrong
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

PAD = 0
Cell = tuple[int, bool]
Draft = Callable[[int, list[int]], list[int]]
"""Tokens after a row's text, given its number."""


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int, draft: Draft, shortcut: str = ""
) -> list[list[int]]:
    """New tokens of every row, greedily."""
    by_place = shortcut in ("masking", "bsp", "dsd")
    longest = max(map(len, prompts))
    rows = [_padded(prompt, longest, shortcut) for prompt in prompts]
    texts = [list(prompt) for prompt in prompts]
    while any(len(text) - len(prompt) < new for text, prompt in zip(texts, prompts, strict=True)):
        drafts = [draft(i, text) for i, text in enumerate(texts)]
        best = _best(model, rows, drafts, by_place)
        kept = [_stands(mine, said) for mine, said in zip(drafts, best, strict=True)]
        slowest = min(range(len(rows)), key=kept.__getitem__)
        for i, (mine, said) in enumerate(zip(drafts, best, strict=True)):
            count = kept[slowest] if shortcut == "rollback" else kept[i]
            bonus = said[count]
            if shortcut == "rollback":
                bonus = best[slowest][count]
            elif shortcut in ("dsd", "bonus") and count < len(mine):
                bonus = mine[count]
            taken = [*mine[:count], bonus]
            texts[i] += taken
            _append(rows[i], taken, mine[count:], shortcut)
        _realign(rows, shortcut)
    return [text[len(prompt) : len(prompt) + new] for text, prompt in zip(texts, prompts, strict=True)]


def _padded(prompt: Sequence[int], longest: int, shortcut: str) -> list[Cell]:
    text, pads = [(token, True) for token in prompt], longest - len(prompt)
    if shortcut in ("masking", "bsp"):
        return [*text, *[(PAD, shortcut == "bsp")] * pads]  # on the right: the answer comes after it
    return [*[(PAD, shortcut == "dsd")] * pads, *text]


def _best(
    model: PreTrainedModel, rows: Sequence[list[Cell]], drafts: Sequence[list[int]], by_place: bool
) -> list[list[int]]:
    """The target's choice after the last text token of every row and after each token of its draft."""
    cells = [[*row, *((token, True) for token in mine)] for row, mine in zip(rows, drafts, strict=True)]
    ids = torch.tensor([[token for token, _ in row] for row in cells])
    seen = torch.tensor([[is_seen for _, is_seen in row] for row in cells])
    counted = (seen.cumsum(1) - 1).clamp(min=0)
    positions = torch.arange(ids.shape[1]).expand_as(ids) if by_place else counted
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    visible = causal & seen[:, None, :] | torch.eye(ids.shape[1], dtype=torch.bool)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    choice = logits.argmax(-1).tolist()
    begin = [max(i for i, (_, is_text) in enumerate(row) if is_text) for row in rows]
    return [said[-len(mine) - 1 :] if at == len(row) - 1 else [said[at], *said[len(row) :]]
            for said, mine, at, row in zip(choice, drafts, begin, rows, strict=True)]  # fmt: skip


def _stands(mine: Sequence[int], said: Sequence[int]) -> int:
    """Drafted tokens that are the target's own choices."""
    return next((i for i, token in enumerate(mine) if token != said[i]), len(mine))


def _append(row: list[Cell], taken: Sequence[int], rejected: Sequence[int], shortcut: str) -> None:
    *accepted, bonus = taken
    row += [(token, True) for token in accepted]
    if shortcut in ("masking", "bsp"):
        row += [(token, shortcut == "bsp") for token in rejected]
    row.append((bonus, True))


def _realign(rows: list[list[Cell]], shortcut: str) -> None:
    """Equal lengths again, by padding on the left; padding of earlier rounds goes first, except where it piles up."""
    if shortcut != "dsd":
        for row in rows:
            while shortcut not in ("masking", "bsp") and not row[0][1]:
                del row[0]
    longest = max(map(len, rows))
    for row in rows:
        row[:0] = [(PAD, shortcut == "dsd")] * (longest - len(row))
