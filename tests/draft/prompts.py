"""Requests to a target that is a table, and what plain decoding answers to them."""

PROMPTS = [[1], [3, 3], [1, 2, 3, 1, 2], [0, 0, 0, 0, 0, 0, 0], [5, 4, 0, 7] * 9]


def plain(target, params):
    """Tokens and finish_reason of each of PROMPTS."""
    rows = [target.plain(prompt, params) for prompt in PROMPTS]
    return [(row.new_tokens.tolist(), row.finish_reason) for row in rows]
