"""The tokenizer: any text survives, digits stay apart, and the chat template marks what the assistant said."""


import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from zoo.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

TEXT = ["The cat sat on the mat, and the dog sat by the door.", "Der alte Mann sieht das große Haus.", "12 + 30 = 42"]
CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Where is the cat? "},
    {"role": "assistant", "content": "On the mat."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(TEXT * 20, vocabulary=320), folder)
    return load_tokenizer(folder)


@settings(max_examples=25)
@given(text=st.text(max_size=40))
def test_any_text_survives(tokenizer, text):
    if "<|" not in text:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_stay_apart(tokenizer):
    assert tokenizer.tokenize("2024") == list("2024")


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == (
        "<|endoftext|><|system|>\nBe brief.<|end|>\n<|user|>\nWhere is the cat?<|end|>\n"
        "<|assistant|>\nOn the mat.<|end|>\n"
    )
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == text[: text.index("On the mat")]
    with pytest.raises(jinja2.TemplateError, match="unknown role robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


def test_the_mask_covers_the_answer(tokenizer):
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [i for i, wanted in zip(out["input_ids"], out["assistant_masks"], strict=True) if wanted]
    assert tokenizer.decode(said) == "On the mat.<|end|>"


def test_auto_tokenizer_reads_it(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode(TEXT[0]) == tokenizer.encode(TEXT[0])
    assert (again.bos_token, again.eos_token) == ("<|endoftext|>", "<|end|>")
    assert again.chat_template == tokenizer.chat_template
