"""The law of what an engine writes with a drafter, by walking every branch of every round there can be."""

from __future__ import annotations

import numpy as np

from paceline.core.accept import accept
from paceline.core.request import Row
from paceline.core.round import Round
from paceline.core.sampling import Grammar, SamplingParams, probabilities
from paceline.core.segment import Segment
from paceline.draft.base import Drafter
from paceline.target.decoder import Decoder
from tests.lossless_enumeration import Branches, BranchingRandom, outcomes
from tests.rounds import prompt_run

Law = dict[tuple[int, ...], float]
"""Probability of every answer."""

WISH = {"temperature": 1.3, "top_k": 4}


def law(target: Decoder, drafter: Drafter, prompt: list[int], new: int, grammar: Grammar | None = None) -> Law:
    """Of answers of `new` tokens with drafts of `drafter`, which is bound here."""
    params = SamplingParams(**WISH, max_tokens=new, grammar=grammar)  # type: ignore[arg-type]
    drafter.bind(target)
    finished: Law = {}
    begun: Law = {(): 1.0}
    while begun:
        answer = min(begun, key=len)
        so_far = begun.pop(answer)
        text = [*prompt, *answer]
        row = Row(0, prompt, params, max_context=target.max_context)
        row.extend(answer)
        row.slot = target.add_row(row.expected_length)
        verdict = target.verify([Segment.chunk(row.slot, np.array(text[:-1]), last=False)], drafter.needs)
        target.commit(row.slot, list(range(len(text) - 1)))
        run = prompt_run(row, text[:-1], verdict)

        def one(branches: Branches, row: Row = row, run: Round = run) -> tuple[int, ...]:
            drafter.start(row)
            drafter.observe(run)
            row.random = BranchingRandom(branches)
            [tree] = drafter.propose([row])
            said = target.verify([Segment.tree(row.slot, tree)], drafter.needs)
            [done] = accept([row], [tree], [said.of(0)])
            drafter.drop(row)
            return tuple(done.tokens)

        for tokens, probability in outcomes(one).items():
            longer = (*answer, *tokens)
            to = finished if len(longer) == new else begun
            to[longer] = to.get(longer, 0.0) + so_far * probability
        target.drop_row(row.slot)
    return finished


def plainly(target: Decoder, prompt: list[int], new: int, grammar: Grammar | None = None) -> Law:
    """The same of plain decoding."""
    params = SamplingParams(**WISH, grammar=grammar).of_row(len(prompt), frozenset())  # type: ignore[arg-type]
    answers: Law = {(): 1.0}
    for _ in range(new):
        longer = {}
        for answer, before in answers.items():
            slot = target.add_row(len(prompt) + new)
            text = np.array([*prompt, *answer])
            logits = target.verify([Segment.chunk(slot, text, last=True)]).logits
            target.drop_row(slot)
            after = probabilities(logits, params, [text])[0].tolist()
            longer |= {(*answer, token): before * p for token, p in enumerate(after) if p > 0}
        answers = longer
    return answers
