"""The demo family's tokenizer: byte-level BPE, saved as a transformers fast tokenizer with a chat template.

`<|endoftext|>` begins a document and separates documents; `<|end|>` ends a chat turn and a chat answer. Any text
survives encode and decode unchanged, because the alphabet is the 256 bytes."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 8192
DOCUMENT, USER, ASSISTANT, SYSTEM, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL = [DOCUMENT, USER, ASSISTANT, SYSTEM, END]

# `{% generation %}` marks what the assistant wrote: transformers can return it as a mask. Only that is learnt.
CHAT_TEMPLATE = (
    "{{ '<|endoftext|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' }}{% generation %}{{ message['content'] | trim + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% elif message['role'] in ['system', 'user'] %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] | trim + '<|end|>\n' }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# Words with their leading space, digits one by one (sums line up), punctuation runs, white space.
SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=DOCUMENT,
        eos_token=END,
        pad_token=DOCUMENT,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the template inside the config so that older readers find it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of a special token."""
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number
