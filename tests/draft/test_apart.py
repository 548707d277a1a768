"""Rows that share a drafter know nothing of each other."""

import pytest

from paceline.draft.registry import create
from tests.draft.rows import row, target, tokens

TEXTS = {1: "the cat sat on the mat, the cat", 2: "abcabcabcab", 3: "the dog; the", 4: "xyzzy xyz"}
GAINED = [" sat", "cab", " do", "zy"]


@pytest.mark.parametrize(
    "spec", ["prompt-lookup", "sam", "suffix", "hierarchy", "blend", "ngram-pool,window=0", "sam+suffix"]
)
def test_a_row_drafts_the_same_alone_and_beside_others(spec: str) -> None:
    together = create(spec)
    together.bind(target())
    rows = [row(text, id=id) for id, text in TEXTS.items()]
    for one in rows:
        together.start(one)
    for gained in ["", *GAINED]:
        for one in rows:
            one.extend(tokens(gained))
        for one, tree in zip(rows, together.propose(rows), strict=True):
            alone = create(spec)
            alone.bind(target())
            alone.start(one)
            [expected] = alone.propose([one])
            assert tree.tokens.tolist() == expected.tokens.tolist()
            assert tree.parent.tolist() == expected.parent.tolist()
