"""Bugs that engines with drafts have had, planted into ours one at a time, and the small world they live in.

with planted("residual not used", world) as engine:
    certify(engine, world.exact(), ...)
"""

import copy
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import torch

from paceline.certify.command import local
from paceline.certify.exact import Exact
from paceline.core import accept
from paceline.core.accept import Cursor, Lossless, follow, target_distributions
from paceline.core.noise import Noise
from paceline.core.request import Row
from paceline.core.sampling import probabilities
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter
from paceline.draft.recording import Recording
from paceline.formats.tokenizer import Tokenizer
from paceline.peers.reference import PlainDecoding, Reference
from paceline.target import layout
from paceline.target.decoder import Decoder
from tests import drafters, models, native

VOCAB = 288
"""Of the model: no more than its tokenizer knows."""
PAD = 5


class World:
    """A random model of one layer's worth of work, its tokenizer, prompts, and drafters that fit it.

    precision  "int8" or "int4": its weights are in blocks, and its reference is our own plain decoding; "bfloat16": the
               engine runs in it."""

    def __init__(self, seed=0, family="llama2", precision=None):
        blocks = precision if precision != "bfloat16" else None
        wider = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8} if blocks else {}
        model = models.model(family, seed, vocab_size=VOCAB, **native.TINY | wider)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight.mul_(0.1)  # its tokens hang mostly on the last one: it repeats itself
            model.get_output_embeddings().weight.mul_(2.0)
        dtype = torch.float32 if precision != "bfloat16" else torch.bfloat16
        self.target = native.of(model, dtype, precision=blocks)
        self.tokenizer = Tokenizer(models.tokenizer())
        self.target.tokenizer = self.tokenizer
        alone = PlainDecoding(native.of(model, precision=blocks)) if blocks else Reference(model)
        own = Reference(copy.deepcopy(model).to(dtype)) if precision == "bfloat16" else None
        self.alone, self.own = alone, own
        rng = np.random.default_rng(seed)
        self.prompts = [rng.integers(4, VOCAB, n).tolist() for n in (9, 3, 14, 6)]
        self.starts = [rng.integers(4, VOCAB, 4).tolist() for _ in range(4)]

    def exact(self, prompts=None, **more):
        """What judges an engine that runs it."""
        facts = Recording(self.tokenizer, tuple(self.target.eos_token_ids), VOCAB)
        return Exact(self.alone, self.own, facts, prompts or self.prompts, self.starts, **more)

    @cache  # noqa: B019
    def table(self):
        """The target's logits after every token alone, [V, V]: a drafter's q."""
        slot = self.target.add_row(2)
        star = np.array([-1] + [0] * VOCAB)
        nodes = Segment(slot, np.array([1, *range(VOCAB)]), star, num_logits=VOCAB)
        logits = self.target.verify([nodes]).logits.float()
        self.target.drop_row(slot)
        return logits

    def coupled(self):
        return drafters.Coupled(self.table())

    def best(self):
        return Best(self.table())


class Best(Drafter):
    """Drafts the best token of a table, and the best after that, as a chain; often right, and often wrong."""

    name = "best"

    def __init__(self, table, count=4):
        self.after, self.count = table.argmax(-1).tolist(), count

    def draft(self, row, most):
        tokens = [row.last_token]
        for _ in range(min(self.count, most)):
            tokens.append(self.after[tokens[-1]])
        return DraftTree.chain(tokens[0], tokens[1:], source=self.name)


class OneByOne(Lossless):
    """A rule that decides rows one at a time, by `step`."""

    def decide(self, walkers):
        return [w for w in walkers if self.step(w)]

    def step(self, walker):
        return bool(super().decide([walker]))


class ByDraft(OneByOne):
    """A rule that reads the draft's distribution q. table: its logits after each token, [V, V]."""

    def __init__(self, table):
        self.table = table

    def q(self, walker):
        """After the cursor's last token."""
        row = self.table[int(walker.tree.tokens[walker.node])].unsqueeze(0)
        return probabilities(row, walker.request.params, [walker.context])[0]


class BonusFromDraft(ByDraft):
    """After a draft that stands to its end, the last token comes from the draft's q."""

    def step(self, walker):
        if walker.node and not walker.tree.children(walker.node) and not walker.request.params.is_greedy:
            walker.done.tokens.append(walker.request.noise.choose(self.q(walker), walker.position))
            return False
        return super().step(walker)


class NoResidual(ByDraft):
    """The ratio test, and after a rejection the token is drawn from p, not from what p has more than q."""

    def step(self, walker):
        children, noise = walker.tree.children(walker.node), walker.request.noise
        if not children or walker.request.params.is_greedy:
            return super().step(walker)
        token, q = int(walker.tree.tokens[children[0]]), self.q(walker)
        p = target_distributions([walker])[0].to(q)
        if noise.happens(min(1.0, float(p[token] / q[token])), walker.position):
            return follow(walker, token)
        walker.done.tokens.append(Noise(noise.seed + 1).choose(p, walker.position))
        return False


class ArgmaxRoot(OneByOne):
    """The first token of a round is the best one, also when sampling."""

    def step(self, walker):
        if walker.node == 0 and len(walker.tree) > 1 and not walker.request.params.is_greedy:
            return follow(walker, int(target_distributions([walker])[0].argmax()))
        return super().step(walker)


class DraftsAccepted(OneByOne):
    """When sampling, whatever was drafted stands. beyond: only after this many tokens."""

    def __init__(self, beyond=0):
        self.beyond = beyond

    def step(self, walker):
        children = walker.tree.children(walker.node)
        if children and not walker.request.params.is_greedy and len(walker.context) > self.beyond:
            return follow(walker, int(walker.tree.tokens[children[0]]))
        return super().step(walker)


class Tolerant(OneByOne):
    """When greedy, the second best token is taken where its logit is nearly that of the best."""

    def step(self, walker):
        logits, tokens = walker.logits[walker.node].float().topk(2)
        if walker.request.params.is_greedy and logits[0] - logits[1] < NEARLY:
            return follow(walker, int(tokens[1]))
        return super().step(walker)


class PaddingAccepted(OneByOne):
    """A drafted padding token is taken for accepted."""

    def step(self, walker):
        if any(walker.tree.tokens[child] == PAD for child in walker.tree.children(walker.node)):
            return follow(walker, PAD)
        return super().step(walker)


class Padded(Best):
    """Pads its drafts to their full length."""

    def draft(self, row, most):
        tokens = [*super().draft(row, most).tokens[1:2].tolist(), PAD, PAD][:most]
        return DraftTree.chain(row.last_token, tokens, source=self.name)


NEARLY = 0.04
"""What bfloat16 changes of the small world's logits."""


def _rule(rule):
    @contextmanager
    def plant(world):
        made = rule(world.table()) if isinstance(rule, type) else rule
        drafter = Padded(world.table()) if isinstance(made, PaddingAccepted) else world.coupled()
        yield local(world.target, world.tokenizer, lambda: drafter, rule=made)

    return plant


def _patch(where, name, value, drafter="best"):
    @contextmanager
    def plant(world):
        with patch.object(where, name, value):
            yield local(world.target, world.tokenizer, getattr(world, drafter))

    return plant


@contextmanager
def _sees_ahead(world):
    """A node sees the next one of its chain too, in either form of attention."""
    of = layout.PathPlan.of

    def ahead(*args, **options):
        plan = of(*args, **options)
        if plan is not None:
            plan.ends[:-1] += plan.ends[1:] == plan.ends[:-1] + 1
        return plan

    further = np.triu(np.full_like(layout._CHAIN, -np.inf), 2)
    with patch.object(layout, "_CHAIN", further), patch.object(layout.PathPlan, "of", ahead):
        yield local(world.target, world.tokenizer, world.best)


def _shifted(cls, slot, tree):
    depth = np.where(tree.depth > 0, tree.depth + 1, 0)
    return Segment(slot, tree.tokens, tree.parent, num_logits=len(tree), depth=depth)


def _at_the_end_only(row, tokens, source="", logprobs=None):
    """Row.extend, looking for stop strings after a round's last token alone."""
    stops, row.params = row.params, type(row.params)(**{**vars(row.params), "stop": ()})
    taken = 0
    for i, token in enumerate(tokens):
        if i == len(tokens) - 1:
            row.params = stops
        taken += _extend(row, [token], "", logprobs)
        if row.finish_reason is not None:
            break
    row.params = stops
    return taken


_extend, _commit = Row.extend, Decoder.commit


def _no_rollback(target, slot, path):
    """Keep as many entries as there were nodes before the path ended, wrong ones in place of the right ones."""
    _commit(target, slot, [0, *(node + 1 for node in path[1:])] if len(path) > 1 else path)


def _without_top_p(cursors):
    """The target's distributions, without top-p."""
    request = cursors[0].request
    params, request.params = request.params, replace(request.params, top_p=1.0)
    probs = target_distributions(cursors)
    request.params = params
    return probs


def _of_the_first_place(cursors, probs):
    return [w.request.noise.choose(p, 0) for w, p in zip(cursors, probs, strict=True)]


BUGS = {
    "bonus from the draft": _rule(BonusFromDraft),
    "residual not used": _rule(NoResidual),
    "argmax root when sampling": _rule(ArgmaxRoot()),
    "mask off by one": _sees_ahead,
    "positions off by one": _patch(Segment, "tree", classmethod(_shifted)),
    "padding accepted": _rule(PaddingAccepted()),
    "noise by the draft's depth": _patch(Cursor, "position", property(lambda w: len(w.done.tokens)), "coupled"),
    "stop string missed inside a draft": _patch(Row, "extend", _at_the_end_only),
    "seed reused": _patch(accept, "chosen", _of_the_first_place),
    "cache not rolled back": _patch(Decoder, "commit", _no_rollback),
    "every n-gram draft accepted": lambda world: _copying(world, DraftsAccepted()),
    "every n-gram draft accepted beyond 64 tokens": lambda world: _copying(world, DraftsAccepted(64)),
    "top-p on the draft alone": _patch(accept, "target_distributions", _without_top_p, "coupled"),
}


@contextmanager
def _copying(world, rule):
    yield local(world.target, world.tokenizer, "prompt-lookup", rule=rule)


@contextmanager
def planted(bug, world):
    """An engine with that bug."""
    with BUGS[bug](world) as engine, engine:
        yield engine
