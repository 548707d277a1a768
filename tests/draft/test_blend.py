"""blend: its tree against the formula written out with dictionaries, and what it reads."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.draft.blend import CORPUS_DOUBT, ENOUGH, OWN_DOUBT, Blend, BlendConfig
from paceline.draft.text.frozen import build_part
from paceline.draft.text.store import writing
from paceline.engine.engine import Engine
from paceline.engine.request import Row
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree
from paceline.errors import MethodError, StoreError
from tests.draft.rows import letters, row, tokens
from tests.fakes import TableTarget


def corpus(folder: Path, documents: list[list[int]], eos: int = 0) -> str:
    text = np.array([t for document in documents for t in [*document, eos]], np.int32)
    ends = np.cumsum([len(document) + 1 for document in documents])
    with writing(folder / "corpus", kind="corpus", tokenizer="abc", eos=eos) as store:
        store.add("text", text)
        for name, array in build_part(text, ends, int(text.max()) + 1).items():
            store.add(name, array)
    return str(folder / "corpus")


def with_tokenizer(eos: str = "") -> SimpleNamespace:
    return SimpleNamespace(eos_token_ids=tuple(tokens(eos)), tokenizer=SimpleNamespace(fingerprint="abc"))


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


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("with_corpus", [False, True])
def test_the_tree_holds_the_most_probable_paths(seed: int, with_corpus: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(1, 5, 40).tolist()
    documents = [rng.integers(1, 5, 25).tolist() for _ in range(3)] if with_corpus else []
    config = BlendConfig(nodes=12, longest=4, least=0.02, corpus=corpus(tmp_path, documents) if with_corpus else None)
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


def test_nothing_is_drafted_behind_an_end_or_beyond_the_room() -> None:
    drafter = Blend(BlendConfig(nodes=10))
    drafter.bind(with_tokenizer(eos="."))
    ended = row("ab.ab.ab")
    drafter.start(ended)
    assert letters(drafter.propose([ended])[0].tokens[1:]) == "."
    short = row("abcdabcdab", room=3)
    drafter.start(short)
    assert drafter.propose([short])[0].max_depth == 2
    full = row("abcdabcdab", room=1)
    drafter.start(full)
    assert drafter.propose([full])[0].num_drafted == 0


def test_finished_requests_are_remembered_and_forgotten() -> None:
    drafter = Blend(BlendConfig(nodes=2, past=60))
    drafter.bind(with_tokenizer())

    def finish(text: str, id: int, reason: str = "stop") -> None:
        one = row(text, id=id)
        drafter.start(one)
        one.finish_reason = reason  # type: ignore[assignment]
        drafter.drop(one)

    def draft(text: str) -> str:
        one = row(text, id=99)
        drafter.start(one)
        (tree,) = drafter.propose([one])
        drafter._counts.pop(99)
        return letters(tree.tokens[1:])

    finish("hello world", 1)
    finish("never heard", 2, reason="abort")
    assert draft("zhe") == "ll"
    assert draft("never"[:3]) == ""
    for i in range(8):
        finish(f"{i}{i}{i}{i}{i}{i}{i}{i}{i}{i}", 3 + i)
    assert draft("zhe") == ""


def test_rows_do_not_see_each_other() -> None:
    drafter = Blend()
    drafter.bind(with_tokenizer())
    first, second = row("secret secret sec", id=1), row("no such thing: sec", id=2)
    drafter.start(first)
    drafter.start(second)
    one, other = drafter.propose([first, second])
    assert letters(one.tokens[1:4]) == "ret"
    assert "r" not in letters(other.tokens[1:2])


def test_bad_options_and_a_wrong_store_are_refused(tmp_path: Path) -> None:
    for options in ({"nodes": 0}, {"longest": 9}, {"least": 1.5}, {"past": -1}):
        with pytest.raises(MethodError, match="BlendConfig: "):
            BlendConfig(**options)  # type: ignore[arg-type]
    path = corpus(tmp_path, [tokens("abc")])
    with pytest.raises(StoreError, match="there is no store"):
        Blend(BlendConfig(corpus=path + "x")).bind(with_tokenizer())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 8])
def test_lossless_with_a_corpus_and_a_past(tmp_path: Path, temperature: float, batch: int) -> None:
    fake = TableTarget(vocab_size=8, order=2, seed=4)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    prompts = [[1], [3, 3], [1, 2, 3, 1, 2], [5, 4, 0, 7] * 9]
    plain = [fake.plain(prompt, params).new_tokens.tolist() for prompt in prompts]
    store = corpus(tmp_path, [answer[:40] for answer in plain])
    engine = Engine(fake, f"blend,corpus={store},past=200,nodes=12", max_batch=batch)
    for _ in range(2):  # the second time with what the first one left in memory
        done = engine.generate(prompts, params)
        assert [one.tokens for one in done] == plain
    assert sum(one.new_tokens for one in done) > 1.2 * sum(one.rounds for one in done)
