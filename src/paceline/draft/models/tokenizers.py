"""Drafting across tokenizers: the draft model reads the target's text in its own tokens (Timor et al. 2025, Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies, arXiv 2502.05202).

    tli   token-level intersection: only tokens that both vocabularies have are drafted; at a temperature the row's
          noise chooses among them.
    slem  string-level exact match: the model drafts any of its tokens, and their text is tokenized for the target. The
          model always takes its best token, since the row's noise belongs to the target's tokens.

Both are lossless: what the draft model has read decides what is proposed, never what is accepted. When a text grows,
its last tokens can change, so before each round the draft's cache is cut back to the tokens that still hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from paceline.core.noise import Noise
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.base import up_to_ends
from paceline.draft.models.draft_model import Draft, DraftModel, TextModel
from paceline.draft.models.proposers import Proposal, Proposer
from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.formats.heads.vocab import vocab_size
from paceline.formats.tokenizer import Tokenizer
from paceline.target.base import Target

SHARED = 0.9
"""`own` means tli if the target has at least this share of the draft model's tokens, so that these suffice to write."""
STEP = 32
"""A text is translated in pieces of about this many tokens, each up to the next word."""
SPLIT = 3
"""A text may end with up to this many tokens of an incomplete character, which has four bytes at most."""
_NOTHING = np.zeros(0, np.int64)


class Translator:
    """Turns tokens of `source` into the tokens by which `goal` writes the same text.

    special  for each special token of `source`, the special token of `goal` with the same name, or None."""

    def __init__(self, source: Tokenizer, goal: Tokenizer):
        self.source, self.goal = source, goal
        known = {text: id for id, text in special_tokens(goal).items()}
        self.special = {id: known.get(text) for id, text in special_tokens(source).items()}
        self._lead = goal.encode_text("\n")
        self._adds_space = self._after_line_break("a") != goal.encode_text("a")

    def __call__(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Translate `tokens`. Returns the translation, and the last tokens that are left out of it because their
        character is incomplete.

        before  some tokens of `source` before these; none: the text begins here."""
        out: list[int] = []
        left: list[int] = []
        begin = 0
        for end in [*(i for i, token in enumerate(tokens) if token in self.special), len(tokens)]:
            context = [*before, *tokens[max(0, begin - SPLIT) : begin]]
            text, left = whole_text(self.source, tokens[begin:end], context)
            out += self._encode(text, continues=bool(context))
            if end < len(tokens) and (same := self.special[tokens[end]]) is not None:
                out.append(same)
            begin = end + 1
        return out, left

    def begins_word(self, token: int) -> bool:
        """Whether `goal` can tokenize the texts before and after this token of `source` apart: the token begins a word
        or has no text."""
        return token in self.special or whole_text(self.source, [token], [token])[0].startswith(" ")

    def _encode(self, text: str, continues: bool) -> list[int]:
        if not text:
            return []
        after = self._after_line_break(text) if continues and self._adds_space else None
        return self.goal.encode_text(text) if after is None else after

    def _after_line_break(self, text: str) -> list[int] | None:
        """Encode `text` after a line break, because some tokenizers add a space to the first word of a text. Returns
        None if the line break merges with the text."""
        ids, lead = self.goal.encode_text("\n" + text), self._lead
        return ids[len(lead) :] if ids[: len(lead)] == lead else None


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Names of the tokens without text, by id."""
    return {int(i): str(token.content) for i, token in tokenizer.inner.added_tokens_decoder.items() if token.special}


def whole_text(tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int]) -> tuple[str, list[int]]:
    """The text of `tokens` after `before`, without an incomplete character, and that character's tokens."""
    texts = []
    for cut in range(min(SPLIT, len(tokens)) + 1):
        detokenizer = tokenizer.detokenizer(before)
        texts.append("".join(map(detokenizer.push, tokens[: len(tokens) - cut])) + detokenizer.flush())
        if not texts[-1].endswith("\ufffd"):
            return texts[-1], list(tokens[len(tokens) - cut :])
    return texts[0], []  # The bytes are not UTF-8.


def intersection(own: Tokenizer, target: Tokenizer) -> dict[int, int]:
    """Map tokens of `own`, one to one, to tokens of `target` with the same text; special tokens by their names."""
    known = _spelled(target)
    return {id: known[spelling] for spelling, id in _spelled(own).items() if spelling in known}


def _spelled(tokenizer: Tokenizer) -> dict[bytes | str, int]:
    """Tokens by their bytes, special tokens by their names. A byte token gives way to another token of that byte."""
    out: dict[bytes | str, int] = {name: id for id, name in special_tokens(tokenizer).items()}
    for id in sorted(set(tokenizer.inner.get_vocab().values()) - special_tokens(tokenizer).keys()):
        spelling = tokenizer.spelling(id)
        if isinstance(spelling, str):
            out[spelling.encode()] = id
        elif spelling:
            out.setdefault(spelling, id)
    return out


@dataclass
class _Text:
    """A row's text in the draft's tokens.

    done, fixed   the row's first `done` tokens as the draft's, which never change.
    length, ids   all `length` tokens of the row as the draft's, without `left`.
    left          last tokens of the row, whose character is incomplete."""

    done: int = 0
    length: int = 0
    fixed: IntArray = field(default_factory=_NOTHING.copy)
    ids: IntArray = field(default_factory=_NOTHING.copy)
    left: list[int] = field(default_factory=list)


class VocabBridge:
    """The bridge between a draft model and a target that have different tokenizers.

    drafts_text  whether drafts are the draft model's tokens, for `retokenize` (slem), or the target's (tli).
    own_ids      tokens of the draft model that the target has, too, int64 [K], ascending.
    target_ids   the target's ids of these tokens, int64 [K].
    share        share of the target's tokens that the draft model has.
    vocab_size   one more than the highest id of the draft's tokenizer."""

    def __init__(self, own: Tokenizer, facts: Facts, way: str, own_rows: int):
        assert facts.tokenizer is not None
        target, target_rows = facts.tokenizer, facts.vocab_size
        pairs = sorted((a, b) for a, b in intersection(own, target).items() if a < own_rows and b < target_rows)
        self.drafts_text = way == "slem" or (way == "own" and len(pairs) < SHARED * len(own.inner.get_vocab()))
        if not pairs and not self.drafts_text:
            raise MethodError(f"{own.name} and {target.name} have no token in common: tokenizer=slem drafts text")
        self.own_ids, self.target_ids = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        self.share = len(pairs) / max(target.vocab_size, 1)
        self.vocab_size = min(vocab_size(own), own_rows)
        self._own = np.full(target_rows, -1)
        self._own[self.target_ids.numpy()] = self.own_ids.numpy()
        self._read, self._write = Translator(target, own), Translator(own, target)
        plain, whole = own.encode_text("a"), own.encode("a")
        self._begin = whole[: len(whole) - len(plain)] if whole[len(whole) - len(plain) :] == plain else []
        self._texts: dict[int, _Text] = {}

    def text(self, row: Request) -> IntArray:
        """The row's text in the draft's tokens, int64 [n]."""
        text = self._texts.setdefault(row.id, _Text())
        if text.length == len(row):
            return text.ids
        read, tokens = self._read, row.tokens[text.done :].tolist()
        while len(tokens) > 2 * STEP:  # Cuts depend on the tokens alone.
            cut = next((i for i in range(STEP, 2 * STEP) if read.begins_word(tokens[i])), STEP)
            fixed, left = read(tokens[:cut], self._before(row, text.done))
            cut -= len(left)
            text.fixed, text.done, tokens = np.append(text.fixed, fixed).astype(np.int64), text.done + cut, tokens[cut:]
        last, text.left = read(tokens, self._before(row, text.done))
        spelled = self._own[text.left].tolist()
        if not self.drafts_text and -1 not in spelled:  # The draft goes on inside the character.
            last, text.left = last + spelled, []
        ids = np.append(text.fixed, last).astype(np.int64)
        begins = ids[: len(self._begin)].tolist() == self._begin
        text.ids, text.length = ids if begins else np.append(self._begin, ids).astype(np.int64), len(row)
        return text.ids

    def can_draft(self, row: Request) -> bool:
        """Whether the draft model can go on where the row's text ends."""
        return len(self.text(row)) > 0 and (self.drafts_text or not self._texts[row.id].left)

    def ids(self, draft: Draft) -> list[int]:
        """The draft model's tokens for the nodes of a tli draft, whose committed nodes have them already."""
        return [*draft.tokens[: draft.num_committed], *self._own[draft.drafted].tolist()]

    def retokenize(self, row: Request, drafted: Sequence[int]) -> list[int]:
        """The target's tokens for the text of `drafted`, after the row's last token."""
        text = self._texts[row.id]
        tokens, _ = self._write(drafted, text.ids[-SPLIT:].tolist())
        if tokens[: len(text.left)] != text.left:  # The draft does not go on with the row's incomplete character.
            return []
        return tokens[len(text.left) :]

    def drop(self, row: Request) -> None:
        self._texts.pop(row.id, None)

    @staticmethod
    def _before(row: Request, at: int) -> list[int]:
        return row.tokens[max(0, at - SPLIT) : at].tolist()


@dataclass(frozen=True)
class OwnText:
    """A request as the draft model reads it.

    of            the request; it has all other attributes.
    tokens        its text in the draft model's tokens.
    params, ends  sampling parameters and end tokens by which the model drafts."""

    of: Request
    tokens: IntArray
    params: SamplingParams
    ends: frozenset[int]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def id(self) -> int:
        return self.of.id

    @property
    def slot(self) -> int:
        return self.of.slot

    @property
    def noise(self) -> Noise:
        return self.of.noise

    @property
    def last_token(self) -> int:
        return self.of.last_token

    @property
    def prompt_length(self) -> int:
        return self.of.prompt_length

    @property
    def num_new(self) -> int:
        return self.of.num_new

    @property
    def expected_length(self) -> int:
        return len(self.tokens) + self.of.expected_length - len(self.of)

    @property
    def is_complete(self) -> bool:
        return self.of.is_complete

    @property
    def past(self) -> IntArray | None:
        return self.of.past


class Translating(DraftModel):
    """Base of draft models with a tokenizer of their own: `inner` reads every row in its own tokens."""

    def __init__(self, inner: TextModel, bridge: VocabBridge, notes: Sequence[str] = ()):
        self.inner, self.bridge, self.notes, self.ran = inner, bridge, notes, inner.ran
        self.vocab_size, self.columns, self.weight_bytes = inner.vocab_size, inner.columns, inner.weight_bytes
        self._held: dict[int, IntArray] = {}  # by row id: the tokens in the cache

    def read(self, row: Request) -> OwnText:
        """Translate the row to the draft model's tokens, and cut the cache back to the tokens that have not changed.

        The cache never keeps the last token, which is run again to draft the next."""
        ids = self.bridge.text(row)
        held = self._held.get(row.id, _NOTHING)
        if len(held):
            there = ids[self.inner.first(row) :]
            n = max(min(len(held), len(there) - 1), 0)
            differs = np.flatnonzero(held[:n] != there[:n])
            self._held[row.id] = held = held[: differs[0] if len(differs) else n]
            self.inner.truncate(row, len(held))
        return OwnText(row, ids, row.params, row.ends)

    def start(self, row: Request) -> None:
        self.inner.start(self.read(row))

    def drop(self, row: Request) -> None:
        self.inner.drop(row)
        self.bridge.drop(row)
        self._held.pop(row.id, None)

    def length(self, row: Request) -> int:
        return self.inner.length(row)

    def room(self, row: Request) -> int:
        return self.inner.room(self.read(row)) if self.bridge.can_draft(row) else 0

    def catch_up(self, row: Request) -> None:
        text = self.read(row)
        self.inner.catch_up(text)
        self._held[row.id] = text.tokens[self.inner.first(row) : self.inner.length(row)]

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        return self.inner.extend(drafts, num_logits)

    def keep(self, draft: Draft, ids: Sequence[int], nodes: Sequence[int]) -> None:
        """Commit `nodes` of a draft. ids: the draft model's tokens of all its nodes."""
        self._held[draft.row.id] = np.append(self._held[draft.row.id], np.array(ids, np.int64)[list(nodes)])
        self.inner.commit(draft, nodes)


class SharedTokens(Translating):
    """tli: drafts are tokens that both vocabularies have, by the target's ids."""

    def begin(self, row: Request, most: int = 0) -> Draft:
        return replace(self.inner.begin(self.read(row), most), row=row)

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        return self.inner.extend([replace(draft, tokens=self.bridge.ids(draft)) for draft in drafts], num_logits)

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        self.keep(draft, self.bridge.ids(draft), nodes)


class TextDrafts(Translating):
    """slem: drafts are the draft model's best tokens, whatever the request's parameters. `Retokenized` turns them into
    the target's tokens."""

    def begin(self, row: Request, most: int = 0) -> Draft:
        ends = frozenset(self.inner.network.eos_token_ids)
        return self.inner.begin(replace(self.read(row), params=SamplingParams(), ends=ends), most)

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        # Keeps all that was run: `read` cuts the cache back to the accepted text.
        self.keep(draft, draft.tokens, range(self.ran[draft.row.id]))


class Retokenized:
    """Turns another proposer's chains into chains of the target's tokens."""

    def __init__(self, proposer: Proposer, model: TextDrafts):
        self.proposer, self.bridge = proposer, model.bridge

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        proposals = self.proposer.propose(drafts)
        return [self._retokenized(draft, tree.calls) for draft, (tree, _) in zip(drafts, proposals, strict=True)]

    def _retokenized(self, draft: Draft, calls: int) -> Proposal:
        assert isinstance(draft.row, OwnText)
        row = draft.row.of
        tokens = np.array(self.bridge.retokenize(row, draft.drafted), np.int64)
        tokens, _ = up_to_ends(tokens, np.arange(len(tokens)), row.ends)
        return Proposal(DraftTree.chain(row.last_token, tokens, calls=calls), [None] * (len(tokens) + 1))


def across_tokenizers(
    path: str, way: str, context: int | None, network: Target, own: Tokenizer, target: Facts
) -> Translating:
    """Make a model of `network`, from the folder `path` and with the tokenizer `own`. MethodError if it cannot draft.

    way      value of the option `tokenizer`: "tli", "slem" or "own".
    context  how many of the text's last tokens it reads; None: all."""
    bridge = VocabBridge(own, target, way, network.vocab_size)
    if network.recurrent:
        raise MethodError(
            f"{path} has a tokenizer of its own and a recurrent state, which cannot take back tokens whose text is "
            "tokenized again"
        )
    shared = f"{path} has a tokenizer of its own, with {bridge.share:.0%} of the target's tokens: it drafts "
    if bridge.drafts_text:
        notes = [shared + "text, which is tokenized again (slem)"]
        return TextDrafts(TextModel(network, bridge.vocab_size, context=context), bridge, notes)
    network.trim_head(bridge.own_ids)
    columns = bridge.target_ids.to(target.device)
    inner = TextModel(network, target.vocab_size, columns, context=context)
    return SharedTokens(inner, bridge, [shared + "these alone (tli)"])
