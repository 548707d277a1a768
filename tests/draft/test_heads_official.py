"""The loop that Medusa published pads short paths of its tree and compares the padding; ours does not.

Written from a description of it: paths are padded with node -1, whose token is 0 and whose logits are those of the last
node. Where a short path is accepted whole and the target then says token 0, the padding is accepted, and the next root
comes from a node that is not on the path. In vocabularies in which 0 is an ordinary token that happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.draft.base import Drafter
from paceline.draft.neural.static_heads import planted
from paceline.draft.shapes import Template, compile_template
from paceline.engine.engine import Engine
from paceline.engine.request import Row
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree
from tests.fakes import TableTarget

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]
NEW, MODELS = 30, 60


def guesses(text: Sequence[int], template: Template, vocab_size: int) -> np.ndarray:
    """Tokens of the template's nodes after a text: any function of the text will do."""
    random = np.random.default_rng([len(text), *text[-3:]])
    table = [random.permutation(vocab_size) for _ in range(int(template.depth[-1]))]
    nodes = zip(template.depth[1:].tolist(), template.rank[1:].tolist(), strict=True)
    return np.array([text[-1], *(table[depth - 1][rank] for depth, rank in nodes)])


class Guessing(Drafter):
    """Drafts `guesses`."""

    name = "guessing"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.template = vocab_size, compile_template(PATHS, 3)

    def draft(self, row: Row) -> DraftTree:  # type: ignore[override]
        size = self.template.within(row.max_draft)
        tokens = guesses(row.tokens.tolist(), self.template, self.vocab_size)
        return planted(self.template, tokens[:size], frozenset(), self.name)


def official(target: TableTarget, prompt: Sequence[int], *, padded: bool) -> list[int]:
    """NEW tokens by the published loop; with padded=False paths are compared as far as they are long."""
    template = compile_template(PATHS, 3)
    leaves = sorted(set(range(1, len(template.parent))) - set(template.parent.tolist()))
    deepest = int(template.depth[-1])
    text = list(prompt)
    text.append(int(target.logits_after(text).argmax()))
    while len(text) < len(prompt) + NEW:
        tokens = guesses(text, template, target.vocab_size).tolist()
        texts = [text]
        for node in range(1, len(tokens)):
            texts.append([*texts[template.parent[node]], tokens[node]])
        said = [int(target.logits_after(one).argmax()) for one in texts]
        best: list[int] = []
        count = -1
        for leaf in leaves:
            path = [leaf]
            while path[0]:
                path.insert(0, int(template.parent[path[0]]))
            path += [-1] * (deepest + 1 - len(path)) if padded else []
            carried = [0 if node < 0 else tokens[node] for node in path]
            right = [carried[i + 1] == said[path[i]] for i in range(len(path) - 1)]
            accepted = right.index(False) if False in right else len(right)
            if accepted > count:
                best, count = path, accepted
        text += [0 if node < 0 else tokens[node] for node in best[1 : count + 1]]
        text.append(said[best[count]])
    return text[len(prompt) : len(prompt) + NEW]


def test_padding_is_accepted_there_and_never_here() -> None:
    params = SamplingParams(max_tokens=NEW)
    wrong = {"padded": 0, "true lengths": 0, "ours": 0}
    for seed in range(MODELS):
        target = TableTarget(4, order=2, seed=seed)
        prompt = [1, 2]
        plain = target.plain(prompt, params).new_tokens.tolist()
        wrong["padded"] += official(target, prompt, padded=True) != plain
        wrong["true lengths"] += official(target, prompt, padded=False) != plain
        (done,) = Engine(target, Guessing(4)).generate([prompt], params)
        wrong["ours"] += done.tokens != plain
    assert wrong["ours"] == wrong["true lengths"] == 0
    assert wrong["padded"] > MODELS / 20
