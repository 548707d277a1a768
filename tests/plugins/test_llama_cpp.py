"""Our drafters in llama-cpp-python: plain llama.cpp's text, in fewer forwards."""


import numpy as np
import pytest

from paceline.errors import MethodError, ModelError
from tests import models

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

NEW = 40
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [40, 41, 40, 41, 40], [5, 6, 7, 8] * 20]
"""The last is longer than a batch."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    from paceline.plugins.to_gguf import write

    folder = tmp_path_factory.mktemp("gguf")
    models.make_repetitive(folder)
    write(folder, folder / "model.gguf", "f32")
    return folder / "model.gguf"


def opened(file, draft=None, **how):
    how = {"n_ctx": 128, "n_batch": 64, "logits_all": draft is not None, **how}
    return llama_cpp.Llama(
        model_path=str(file), n_threads=1, n_threads_batch=1, draft_model=draft, verbose=False, **how
    )


def answer(llama, prompt, **how):
    """Tokens, and forwards after the prompt's."""
    widths, evaluate = [], llama.eval
    llama.eval = lambda tokens: (widths.append(len(tokens)), evaluate(tokens))
    stream = llama.generate(prompt, temp=0.0, reset=True, **how)
    tokens = [int(token) for token, _ in zip(stream, range(NEW), strict=False)]
    stream.close()
    llama.eval = evaluate
    return tokens, len(widths)


def test_greedy_text_is_plain_llama_cpps_own(file):
    from paceline.plugins.llama_cpp import check, draft

    plain, drafted, paced = opened(file), opened(file, draft("sam", paced=False)), opened(file, draft("sam"))
    check(drafted)
    rounds = plainly = 0
    for how in ({}, {"repeat_penalty": 1.3}):
        for prompt in [*PROMPTS, PROMPTS[0]]:  # a request again is a new one
            right, once = answer(plain, prompt, **how)
            plainly += once
            tokens, forwards = answer(drafted, prompt, **how)
            assert tokens == right == answer(paced, prompt, **how)[0]
            rounds += forwards
    assert rounds < plainly - 10


def test_the_file_says_what_transformers_says(file):
    from transformers import AutoModelForCausalLM

    from tests.plain import generate

    model = AutoModelForCausalLM.from_pretrained(file.parent)
    assert answer(opened(file), PROMPTS[0], repeat_penalty=1.0)[0] == generate(model, PROMPTS[0], NEW, ())[7:]


def test_the_draft_follows_the_text_it_is_shown():
    from paceline.plugins.llama_cpp import draft

    drafts = draft("sam", most=3)
    assert drafts(np.array([1, 2, 3, 4, 1, 2], np.intc)).tolist() == [3, 4, 1]
    assert drafts(np.array([1, 2, 3, 4, 1, 2, 3], np.intc)).dtype == np.intc
    assert drafts(np.array([9, 8, 9], np.intc)).tolist()[:1] == [8]


def test_what_cannot_be_done_is_refused(file, monkeypatch):
    from paceline.plugins.llama_cpp import check, draft

    with pytest.raises(MethodError, match="asks the target for"):
        draft("recycling")
    with pytest.raises(ModelError, match="logits_all=True"):
        check(opened(file, draft("sam"), logits_all=False))
    llama = opened(file, draft("sam"))
    check(llama)
    for kind in ("recurrent", "hybrid"):
        monkeypatch.setattr(llama_cpp, f"llama_model_is_{kind}", lambda model: True)
        with pytest.raises(ModelError, match=kind):
            check(llama)
        monkeypatch.undo()
