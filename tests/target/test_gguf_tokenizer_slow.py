"""Rules of tokenizers in llama.cpp. Set PACELINE_XLLAMACPP_PYTHON to the interpreter of an environment with xllamacpp,
then

    pytest -m slow tests/target/test_gguf_tokenizer_slow.py
"""

import unicodedata

import pytest
from tests import gguf_files, llama_cpp, models
from tests.target.test_gguf_tokenizer import texts, trained
from transformers import PreTrainedTokenizerFast

from paceline.formats.gguf_file import GGUF
from paceline.formats.gguf_tokenizer import _SAME, RULES, tokenizer_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
APART = ["HTTPServer camelCase isn't DON'T a/b//c\n/d\r\n", "1 22 333 4444 55555"]


@pytest.mark.parametrize("rule", [*RULES, *_SAME])
def test_llama_cpp_splits_text_by_the_same_rule(rule, tmp_path, shared):
    """It does not compose characters first, as some originals do, and knows no marks in the two newest rules."""
    folder = models.make("llama2", tmp_path / "model", vocab_size=400)
    PreTrainedTokenizerFast(tokenizer_object=trained(rule), eos_token="<|end|>").save_pretrained(folder)
    file = gguf_files.write(folder, tmp_path / "model.gguf", pre=rule)
    ours = tokenizer_of(GGUF(file), "m")
    known = [text for text in [*texts(shared), *APART] if "\0" not in text and unicodedata.is_normalized("NFC", text)]
    if rule in ("gpt-4o", "tekken"):
        known = [text for text in known if not any(unicodedata.category(one).startswith("M") for one in text)]
    said = llama_cpp.answers(file, "/tokenize", [{"content": text, "parse_special": True} for text in known])
    assert len(known) > len(APART) + 10
    assert {text: one["tokens"] for text, one in zip(known, said, strict=True)} == {
        text: ours.encode_text(text) for text in known
    }
