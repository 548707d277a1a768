"""What a drafter with a real model writes, by many seeds: the tokens of plain decoding, each time."""

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

WISH = {"temperature": 1.3, "top_k": 4}
SEEDS = range(60)


def texts(target, drafter, prompt, new, grammar=None):
    """Answers of `new` tokens, one for each of SEEDS, with all drafts of `drafter`; up to 20 rows are in a round."""
    engine = Engine(target, drafter, budget=False, max_batch=20)
    wishes = [SamplingParams(**WISH, max_tokens=new, grammar=grammar, seed=seed) for seed in SEEDS]
    made = [done.tokens for done in engine.generate([prompt] * len(SEEDS), wishes)]
    assert len(set(map(tuple, made))) > len(SEEDS) / 4, "seeds that all say the same prove nothing"
    return made
