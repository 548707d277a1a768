"""Small policies with known distributions, and the distribution of a rollout worked out by enumeration."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from paceline.core.accept import accept
from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.rollout.rules import OldToken, Reuse
from paceline.rollout.store import Entry, Key, digest, sampling_text
from tests.fakes import TableTarget
from tests.lossless_enumeration import BranchingNoise, outcomes

VOCAB, LENGTH = 4, 5
PROMPT = [0, 1]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH)
Distribution = dict[tuple[int, ...], float]


def policies(drift, seed=3):
    """An old policy, and a new one whose logits are `drift` away at random. 4 symbols; all of the text counts."""

    def logits(prefix, moved):
        old, change = np.random.default_rng([seed, len(prefix), *prefix]).normal(size=(2, VOCAB))
        return old + moved * change

    return (
        TableTarget(VOCAB, order=None, logits=lambda prefix: logits(prefix, 0.0)),
        TableTarget(VOCAB, order=None, logits=lambda prefix: logits(prefix, drift)),
    )


def distribution_of(policy):
    """Probability of every answer."""
    answers = {(): 1.0}
    for _ in range(LENGTH):
        answers = {
            (*answer, token): before * p
            for answer, before in answers.items()
            for token, p in enumerate(policy.probabilities_after([*PROMPT, *answer], SAMPLED).tolist())
        }
    return answers


def entry_of(policy, tokens, top):
    """An answer of a policy, as the store has it."""
    places = [policy.probabilities_after([*PROMPT, *tokens[:i]], SAMPLED) for i in range(len(tokens))]
    best = [p.topk(min(top, VOCAB)) for p in places]
    return Entry(
        np.array(tokens, np.int32), np.array([float(p[token]) for p, token in zip(places, tokens, strict=True)]),
        np.array([b.indices.tolist() for b in best], np.int32).reshape(len(tokens), -1),
        np.array([b.values.tolist() for b in best]).reshape(len(tokens), -1), 0, 0, False, sampling_text(SAMPLED),
    )


def rolled_out(old, new, rule, top):
    """A rollout by `new` whose old answer is drawn from `old`: its distribution, and the mean number of reused tokens.

    Place by place, with the rule's own decision at each: while the answer is the old one, the next old token is drawn
    from the old policy; after another token all that follows is the new policy's."""
    result = defaultdict(float)
    reused = 0.0
    agreeing = {(): 1.0}
    for place in range(LENGTH):
        longer = defaultdict(float)
        for prefix, weight in agreeing.items():
            p = new.probabilities_after([*PROMPT, *prefix], SAMPLED)
            q = old.probabilities_after([*PROMPT, *prefix], SAMPLED)
            best = q.topk(top)
            for y in range(VOCAB):
                offer = OldToken(y, float(q[y]), best.indices.numpy().astype(np.int32), best.values.numpy())
                for (token, left), share in decisions(rule, p, offer, place).items():
                    probability = weight * float(q[y]) * share
                    if token == y and not left:
                        longer[(*prefix, y)] += probability
                        reused += probability
                    else:
                        go_on(new, (*prefix, token), probability, result)
        agreeing = dict(longer)
    for answer, weight in agreeing.items():
        result[answer] += weight
    return dict(result), reused


def decisions(rule, p, offer, place):
    """Probability of every token that a rule may decide at a place, and of whether it leaves the old answer there."""

    def one(branches):
        cursor = SimpleNamespace(request=SimpleNamespace(noise=BranchingNoise(branches)), position=place)
        reuse = Reuse(Key(b"", 0), None)
        return rule.choose(p, offer, cursor, reuse), reuse.left

    return outcomes(one)


def go_on(policy, prefix, weight, result):
    """Add the distribution of what a policy writes after `prefix`."""
    if len(prefix) == LENGTH:
        result[prefix] += weight
        return
    for token, p in enumerate(policy.probabilities_after([*PROMPT, *prefix], SAMPLED).tolist()):
        go_on(policy, (*prefix, token), weight * p, result)


def through_acceptance(old, new, rule, top, length):
    """The distribution of the first `length` tokens, enumerated through `accept` as the engine calls it: one token
    after the prompt, then drafts of the old answer."""
    result = defaultdict(float)
    params = replace(SAMPLED, max_tokens=length)
    for tokens, weight in shortened(distribution_of(old), length).items():
        entry = entry_of(old, tokens, top)

        def one(branches, entry=entry):
            row = Row(0, PROMPT, params, max_context=64)
            row.noise = BranchingNoise(branches)
            reuse = rule.begin(row, Key(digest(PROMPT), 0), entry)
            while row.finish_reason is None:
                draft = entry.tokens[row.num_new :] if row.num_new and not reuse.left else []
                tree = DraftTree.chain(row.last_token, draft).clipped(row.max_draft)
                text = row.tokens.tolist()
                after = [new.logits_after([*text, *tree.tokens[1 : n + 1].tolist()]) for n in range(len(tree))]
                [done] = accept([row], [tree], [torch.stack(after)], rule)
                row.extend(done.tokens)
            return tuple(row.new_tokens.tolist())

        for answer, probability in outcomes(one).items():
            result[answer] += weight * probability
    return dict(result)


def shortened(distribution, length):
    """The distribution of the first tokens."""
    short = defaultdict(float)
    for tokens, weight in distribution.items():
        short[tokens[:length]] += weight
    return dict(short)


def total_variation(one, other):
    """Half the sum of the differences."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2


def formula(old, new, lenience):
    """The distribution of the plain rule by its formula: at each place min(q, l p) is kept, and what is missing to 1 is
    drawn from p; all that follows a rejection is the new policy's."""
    result = defaultdict(float)
    agreeing = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for prefix, weight in agreeing.items():
            q = old.probabilities_after([*PROMPT, *prefix], SAMPLED).tolist()
            p = new.probabilities_after([*PROMPT, *prefix], SAMPLED).tolist()
            both = [min(a, lenience * b) for a, b in zip(q, p, strict=True)]
            for token in range(VOCAB):
                longer[(*prefix, token)] = weight * both[token]
                go_on(new, (*prefix, token), weight * (1 - sum(both)) * p[token], result)
        agreeing = longer
    for prefix, weight in agreeing.items():
        result[prefix] += weight
    return dict(result)


def world():
    """Old and new policy with their distributions."""
    old, new = policies(0.35)
    return SimpleNamespace(
        old=old, new=new, old_distribution=distribution_of(old), new_distribution=distribution_of(new)
    )
