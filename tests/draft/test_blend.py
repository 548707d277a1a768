"""blend: its tree against the formula written out with dictionaries, and what it reads."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft.methods.blend import CORPUS_DOUBT, ENOUGH, OWN_DOUBT, Blend, BlendConfig
from paceline.draft.text import frozen
from tests.draft.rows import letters, row, tokens
from tests.draft.stores import corpus_of


def with_tokenizer(eos: str = "") -> SimpleNamespace:
    return SimpleNamespace(eos_token_ids=tuple(tokens(eos)), tokenizer=SimpleNamespace(fingerprint="letters"))


def followers(text: list[int], context: tuple[int, ...]) -> list[int]:
    n = len(context)
    return [text[end] for end in range(n, len(text)) if tuple(text[end - n : end]) == context]


def predicted(text: list[int], history: list[int], other: list[int], config: BlendConfig) -> dict[int, float]:
    """The docstring's formula. The corpus speaks once for every set of places where a context of any length ends."""
    chances: dict[int, float] = {}
    left = 1.0
    known = [n for n in range(1, len(history) + 1) if occurs(other, tuple(history[-n:]))]
    groups: list[tuple[int, int]] = []  # the longest context of each group, and how long the first one matched
    for n in reversed(known):
        ends = [i for i in range(n, len(other) + 1) if tuple(other[i - n : i]) == tuple(history[-n:])]
        if not groups or len(ends) != groups[-1][1]:
            groups.append((n, len(ends)))
    for longer in range(min(config.longest, len(history)), 0, -1):
        own = followers(text, tuple(history[-longer:]))
        if own:
            doubt = OWN_DOUBT[longer - 1] * len(set(own))
            for token in set(own):
                chances[token] = chances.get(token, 0) + left * own.count(token) / (len(own) + doubt)
            left *= doubt / (len(own) + doubt)
        while groups and groups[0][0] >= longer:
            n, _ = groups.pop(0)
            next_ones = followers(other, tuple(history[-n:]))
            at_end = tuple(other[len(other) - n :]) == tuple(history[-n:])
            doubt = CORPUS_DOUBT[min(n, len(CORPUS_DOUBT)) - 1] * len(set(next_ones))
            total = len(next_ones) + at_end
            if len(set(next_ones)) == 1 and not at_end:
                total, weight = 1, 1.0
            for token in set(next_ones):
                times = weight if len(set(next_ones)) == 1 and not at_end else next_ones.count(token)
                chances[token] = chances.get(token, 0) + left * times / (total + doubt)
            left *= doubt / (total + doubt)
        if left < ENOUGH:
            break
    return chances


def occurs(text: list[int], context: tuple[int, ...]) -> bool:
    return any(tuple(text[i : i + len(context)]) == context for i in range(len(text) - len(context) + 1))


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    known: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parent[1:].tolist(), strict=True):
        known.append((*known[parent], token))
    return set(known[1:])


def by_hand(text: list[int], other: list[int], config: BlendConfig, depth: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every path with at least the least chance, the most probable first."""
    found: list[tuple[float, tuple[int, ...]]] = []
    open_paths: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    while open_paths:
        chance, path = open_paths.pop()
        if len(path) == depth or (path and path[-1] == 0):
            continue
        for token, p in predicted(text, [*text, *path][-64:], other, config).items():
            if chance * p >= config.least:
                found.append((chance * p, (*path, token)))
                open_paths.append(found[-1])
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_corpus", [False, True])
def test_the_tree_holds_the_most_probable_paths(seed: int, with_corpus: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(1, 5, 40).tolist()
    documents = [rng.integers(1, 5, 25).tolist() for _ in range(3)] if with_corpus else []
    store = corpus_of(tmp_path / "c", documents, 0, parts=(frozen,)) if with_corpus else None
    config = BlendConfig(nodes=12, longest=4, least=0.02, corpus=store)
    drafter = Blend(config)
    drafter.bind(with_tokenizer())
    one = Row(0, text, SamplingParams(max_tokens=6), max_context=1 << 20)
    drafter.start(one)
    (tree,) = drafter.propose([one])
    flat = [t for document in documents for t in [*document, 0]]
    expected = by_hand(text, flat, config, one.max_draft)
    got = paths(tree)
    assert len(got) == min(config.nodes, len(expected)) == tree.num_drafted
    chance = {path: p for p, path in expected}
    worst = min(chance[path] for path in got)
    left_out = [p for p, path in expected if path not in got]
    assert not left_out or worst >= max(left_out) - 1e-9


def test_what_was_said_most_often_comes_first_and_copies_go_on() -> None:
    drafter = Blend(BlendConfig(nodes=3))
    drafter.bind(with_tokenizer())
    one = row("the cat. the dog. the dog. the ")
    drafter.start(one)
    (tree,) = drafter.propose([one])
    assert letters(tree.tokens[1:2]) == "d"
    chain = row("abcdefgh" * 3)
    drafter.start(chain)
    (tree,) = drafter.propose([chain])
    assert letters(tree.tokens[1:]) == "abc"
