"""Prompts as token ids: from text, token ids or chat messages."""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.core.tree import IntArray
from paceline.errors import PromptError, TooLong
from paceline.formats.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or chat messages with "role" and "content"."""


def is_chat(prompt: Prompt) -> bool:
    """Whether the prompt is a list of chat messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def encode(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, max_context: int) -> IntArray:
    """Turn a prompt into token ids, int64 [n].

    Raises PromptError for a prompt that is empty, cannot be read, has tokens outside the vocabulary, or fills the
    context."""
    ids = np.asarray(_ids(prompt, tokenizer, max_context))
    if not ids.size:
        raise PromptError("The prompt is empty; give it at least one token.")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise PromptError("The prompt's token ids must be one list of whole numbers.")
    tokens = ids.astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise PromptError(f"The prompt has a token id outside the model's 0..{vocab_size - 1}.")
    if len(tokens) >= max_context:
        raise TooLong(
            f"The prompt is too long: it has {len(tokens)} tokens, and this model's context holds {max_context} "
            "with the answer; shorten it."
        )
    return tokens


def _ids(prompt: Prompt, tokenizer: Tokenizer | None, max_context: int) -> Sequence[int]:
    if isinstance(prompt, Mapping) or not hasattr(prompt, "__len__"):
        raise PromptError(
            f"A prompt is text, a list of token ids or a list of messages, not {type(prompt).__name__}; "
            "for one prompt, give a list that holds it."
        )
    if len(prompt) == 0:
        return []
    if not isinstance(prompt, str) and not is_chat(prompt):
        return prompt  # type: ignore[return-value]
    if tokenizer is None:
        raise PromptError(
            "This engine has no tokenizer: give the prompt as token ids, or make the engine with the model's tokenizer "
            "(`load_tokenizer` says what is missing)."
        )
    tokenizer.refuse_long(prompt, max_context)  # type: ignore[arg-type]
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
