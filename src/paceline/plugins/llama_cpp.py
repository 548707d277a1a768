"""Drafters for llama-cpp-python: a `draft_model` for its `Llama`.

    import paceline.plugins.llama_cpp as paceline
    llama = Llama(model_path="model.gguf", draft_model=paceline.draft("sam"), logits_all=True)
    paceline.check(llama)                     # refuses models that cannot forget a rejected draft

llama-cpp-python samples every position from the model and accepts the draft while the two agree, so answers are exact,
greedy or sampled. It runs one request at a time, recognised by its tokens. Works with llama-cpp-python 0.3."""

from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

import llama_cpp
from paceline.draft.recording import Recording
from paceline.errors import ModelError
from paceline.formats.tokenizer import Tokenizer
from paceline.plugins.history import History, OneAtATime

LIMIT = 1 << 30  # No limit on a text's tokens: the host has one, and cuts drafts itself.
ANY = 1 << 18  # Larger than any vocabulary, since the model is unknown. Drafts copy tokens of the text anyway.


class Draft(LlamaDraftModel):
    def __init__(self, history: History):
        self._request = OneAtATime(history, LIMIT)

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """The draft after `input_ids`, a live view of the whole text."""
        return self._request.draft(input_ids.astype(np.int64)).astype(np.intc)


def draft(
    spec: str = "sam",
    *,
    most: int = 16,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = ANY,
    eos_token_ids: tuple[int, ...] = (),
    paced: bool = True,
) -> Draft:
    """A draft model with the drafter `spec`, for at most `most` tokens a draft.

    tokenizer  the model's (`paceline.target.load.load_tokenizer`), for drafters with a corpus.
    paced      cut drafts to what pays: on a CPU with quantised weights each verified token costs nearly a forward.
    Raises MethodError for a drafter that needs more than tokens."""
    return Draft(History(spec, Recording(tokenizer, eos_token_ids, vocab_size, name="a GGUF model"), most, paced))


def check(llama: Any) -> None:
    """Raise ModelError for recurrent and hybrid models, which cannot forget a rejected draft, and for a model opened
    without logits_all, which fails with drafts when a text is longer than n_batch tokens.

    llama-cpp-python does not check that a draft was forgotten, and would go on from a wrong state."""
    if len(llama.scores) < llama.context_params.n_ctx:
        raise ModelError("give Llama logits_all=True: with a draft_model it keeps the logits of all tokens")
    kinds = {"recurrent": llama_cpp.llama_model_is_recurrent, "hybrid": llama_cpp.llama_model_is_hybrid}
    if kind := next((kind for kind, applies in kinds.items() if applies(llama.model)), ""):
        raise ModelError(f"this model is {kind}: it cannot forget a rejected draft, so draft_model must be None")
