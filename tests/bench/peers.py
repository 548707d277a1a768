"""Asking a peer on a tiny model."""

from contextlib import contextmanager
from types import SimpleNamespace

from tests import models

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.peers import create_peer
from paceline.target.load import load

PROMPTS = [[0, 9, 40, 41, 42, 9, 40, 41], [0, 50, 51, 52], [0, 7, 30, 31, 7, 30, 31, 7, 30]]
NEW = 24


def decode(tokens):
    return " ".join(map(str, tokens))


def peer(spec, model, **changes):
    setup = {
        "dtype": "float32", "threads": None, "python": None, "batch": 4, "max_context": models.MAX_CONTEXT,
        "tokenizer": SimpleNamespace(decode=decode),
    }
    return create_peer(spec, str(model), **(setup | changes))


@contextmanager
def opened(spec, model, **changes):
    one = peer(spec, model, **changes)
    try:
        one.open()
        yield one
    finally:
        one.close()


def asked(one, prompts, ends=(), seeds=(), **how):
    """What an engine answers to prompts of token ids. seeds: of each, where they are sampled."""
    bodies = [{"prompt": prompt, "stop_token_ids": ends, "ignore_eos": True, **how} for prompt in prompts]
    for body, seed in zip(bodies, seeds, strict=False):
        body["seed"] = seed
    return one.ask(bodies)


def answers(model, new=NEW, ends=()):
    """What our engine says, plainly."""
    engine = Engine(load(model, dtype="float32"))
    params = SamplingParams(max_tokens=new, ignore_eos=True, stop_token_ids=ends)
    return [one.tokens for one in engine.generate(PROMPTS, params)]


def check(turn):
    """What holds of every completion that tells its rounds."""
    assert turn.nodes is not None
    assert (sum(turn.lengths), turn.times) == (len(turn.tokens), sorted(turn.times))
    assert turn.times[0] > 0
    assert turn.times[-1] <= turn.seconds
    assert len(turn.lengths) == len(turn.times) == len(turn.nodes)
    assert all(length <= nodes + 1 for length, nodes in zip(turn.lengths, turn.nodes, strict=True))
    assert (turn.depths, turn.text) == (turn.nodes, decode(turn.tokens))
