"""Requests to a target that is a table, and what plain decoding answers to them."""

from paceline.engine.sampling import SamplingParams

PARAMS = {
    "greedy": SamplingParams(max_tokens=60),
    "greedy, penalised": SamplingParams(max_tokens=40, repetition_penalty=1.3),
    "sampled": SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=3),
    "ends early": SamplingParams(max_tokens=60, temperature=1.0, seed=5, stop_token_ids=[2, 6]),
    "one token": SamplingParams(max_tokens=1),
    "two tokens": SamplingParams(max_tokens=2),
}
PROMPTS = [[1], [3, 3], [1, 2, 3, 1, 2], [0, 0, 0, 0, 0, 0, 0], [5, 4, 0, 7] * 9]


def plain(target, params):
    """Tokens and finish_reason of each of PROMPTS."""
    rows = [target.plain(prompt, params) for prompt in PROMPTS]
    return [(row.new_tokens.tolist(), row.finish_reason) for row in rows]
