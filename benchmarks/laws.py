"""How often a drafted token stands by each law of acceptance, from a model's own p and a drafter's own q.

    python -m benchmarks.laws smollm2 eagle3:E,tree=0 medusa:M model:D --prompts question.jsonl --every 40
    python -m benchmarks.laws QWEN.gguf eagle3:E,tree=0 --prompts question.jsonl --temperatures 0.7 --top-p 1 0.9

Places are those of answers that the target itself writes. At each of them q is what the drafter says of the first
token that it drafts, and p what the target says; both warped as the request wants it. By these two:

ratio      a token drawn from q, kept with probability min(1, p / q): sum of min(p, q), the most that any law reaches
           (Leviathan et al. 2023)
coupled    both take the least of E / p and of E / q, with the same noise E: sum over v of 1 / sum over w of
           max(p_w / p_v, q_w / q_v) (Daliri, Musco, Suresh 2024); this is what the engine does
best       the most probable token of q, whatever the noise: p of it
three ...  the same with three children: recursive rejection without replacement (Jeon et al. 2024), the three that the
           noise prefers, the three most probable. The first two are means of --draws draws.

Intervals are 95 % bootstraps over answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from benchmarks.drafters import read_prompts

from paceline.core.accept import Cursor, Lossless, target_distributions
from paceline.core.noise import Noise
from paceline.core.sampling import SamplingParams, probabilities
from paceline.draft import likeliest
from paceline.draft.methods import jacobi
from paceline.draft.models import fixed_tree
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.load import load, load_tokenizer

LAWS = ("ratio", "coupled", "best", "three, recursive", "three, coupled", "three, best")
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Places:
    """What was said of each place of an answer: (p, q), float64 [V] each."""

    said: dict[int, list[tuple[Floats, Floats]]] = field(default_factory=dict)
    drafted: dict[tuple[int, int], Floats] = field(default_factory=dict)

    def note_q(self, row: Any, position: int, logits: torch.Tensor, tokens: Any, size: int) -> None:
        """A drafter's logits [K] of the token at an output position, over the columns `tokens`; None: all."""
        if position != row.num_new or row.params.is_greedy or (row.id, position) in self.drafted:
            return
        try:
            few = probabilities(logits.unsqueeze(0), row.params, [])[0].double().numpy()
        except PacelineError:
            return
        q = np.zeros(size)
        q[np.arange(len(few)) if tokens is None else tokens] = few
        self.drafted[row.id, position] = q


class Watching(Lossless):
    """The lossless rule, which notes p where the drafter has said its q."""

    def __init__(self, places: Places):
        self.places = places

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        for w in cursors:
            q = self.places.drafted.pop((w.request.id, w.position), None)
            if q is not None:
                p = target_distributions([w])[0].double().numpy()
                self.places.said.setdefault(w.request.id, []).append((p, q))
        return super().decide(cursors)


@contextmanager
def listening(places: Places, size: int) -> Iterator[None]:
    """Within it drafters' distributions are noted: of chains as they ask for the next token, of heads as they rank."""
    following, ranked = likeliest.Likeliest.next, likeliest.ranked

    def next_token(self: Any, after: Any, logits: torch.Tensor) -> Any:
        for place, of_row in zip(after, logits, strict=True):
            places.note_q(place.row, place.position, of_row, self._tokens, size)
        return following(self, after, logits)

    def by_rank(row: Any, positions: Any, logits: torch.Tensor, count: int, tokens: Any = None) -> Any:
        places.note_q(row, positions[0], logits[0], tokens, size)
        return ranked(row, positions, logits, count, tokens)

    likeliest.Likeliest.next = next_token  # type: ignore[method-assign]
    holders: list[Any] = [fixed_tree, jacobi]
    for holder in holders:
        holder.ranked = by_rank
    try:
        yield
    finally:
        likeliest.Likeliest.next = following  # type: ignore[method-assign]
        for holder in holders:
            holder.ranked = ranked


# The laws ------------------------------------------------------------------------------------------------------------


def coupled(p: Floats, q: Floats) -> float:
    """The chance that both take the same token, in O(V log V): tokens sorted by p / q are split at each one's own."""
    both = (p > 0) & (q > 0)
    order = np.argsort(np.where(q > 0, p / np.maximum(q, 1e-300), np.inf), kind="stable")
    p, q, both = p[order], q[order], both[order]
    # For v, w has max(p_w / p_v, q_w / q_v) = q_w / q_v where p_w / q_w is at most p_v / q_v, else p_w / p_v.
    below, above = np.cumsum(q), p.sum() - np.cumsum(p)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float((1 / (below / q + above / p))[both].sum())


def recursive(p: Floats, q: Floats, dice: np.random.Generator, count: int) -> bool:
    """Whether one of `count` tokens that are drawn from q without replacement is kept."""
    for _ in range(count):
        if q.sum() <= 0:
            return False
        token = dice.choice(len(q), p=q / q.sum())
        if dice.random() < min(1.0, p[token] / q[token]):
            return True
        p = np.maximum(p - q, 0)
        p = p / p.sum() if p.sum() > 0 else p
        q = q.copy()
        q[token] = 0
        q = q / q.sum() if q.sum() > 0 else q
    return False


def by_law(p: Floats, q: Floats, draws: int, seed: int) -> list[float]:
    """The chance of each of LAWS at one place."""
    best, dice, noise = np.argsort(-q, kind="stable")[:3], np.random.default_rng(seed), Noise(seed)
    kept = [recursive(p, q, dice, 3) for _ in range(draws)]
    of_p, of_q = torch.from_numpy(p), torch.from_numpy(q)
    taken = [noise.choose(of_p, i) in noise.guess(of_q, i, 3)[0] for i in range(draws)]
    return [
        float(np.minimum(p, q).sum()), coupled(p, q), float(p[best[0]]), float(np.mean(kept)), float(np.mean(taken)),
        float(p[best].sum()),
    ]  # fmt: skip


def interval(values: Sequence[Floats], mean: Callable[[Floats], float] = np.mean) -> tuple[float, float]:
    """95 % of the means of answers drawn anew; values: of each answer's places."""
    dice = np.random.default_rng(0)
    made = [
        mean(np.concatenate([values[i] for i in dice.integers(len(values), size=len(values))])) for _ in range(1000)
    ]
    low, high = np.percentile(made, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--characters", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.7, 1.0])
    parser.add_argument("--top-p", type=float, nargs="+", default=[1.0, 0.9])
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--dtype", default="auto")
    asked = parser.parse_args()
    target, tokenizer = load(asked.model, dtype=asked.dtype), load_tokenizer(asked.model)
    prompts = read_prompts(asked.prompts, tokenizer, asked.every, asked.characters)
    print(f"| drafter | T, top_p | places | {' | '.join(LAWS)} | coupled of ratio |")
    print(f"|---|---|---:|{'---:|' * (len(LAWS) + 1)}")
    for spec in asked.specs:
        for temperature in asked.temperatures:
            for top_p in asked.top_p:
                places = Places()
                wishes = [
                    SamplingParams(temperature=temperature, top_p=top_p, max_tokens=asked.max_tokens, seed=seed)
                    for seed in range(len(prompts))
                ]
                with listening(places, target.vocab_size):
                    engine = Engine(
                        target, spec, tokenizer=tokenizer, rule=Watching(places), budget=False, reuse=False
                    )
                    engine.generate(prompts, wishes)
                rows = [
                    np.array([by_law(p, q, asked.draws, seed) for seed, (p, q) in enumerate(said)])
                    for said in places.said.values()
                ]
                if not rows:
                    print(f"| {spec} | {temperature:g}, {top_p:g} | 0 |")
                    continue
                every = np.concatenate(rows)
                means, ratio = every.mean(0), every[:, 1].mean() / every[:, 0].mean()
                low, high = interval([of[:, 1] for of in rows])
                cells = [f"{value:.3f}" for value in means]
                cells[1] += f" ({low:.3f} to {high:.3f})"
                print(f"| {spec} | {temperature:g}, {top_p:g} | {len(every)} | {' | '.join(cells)} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
