"""What becomes of messages on their way through a chat template: marks in people's text, and messages it refuses."""

from collections.abc import Callable
from importlib.resources import files
from itertools import product

import pytest
import tokenizers
from tests import models
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.errors import PromptError
from paceline.formats.marks import Marks
from paceline.formats.tokenizer import Tokenizer
from paceline.target.load import load_tokenizer
from zoo.tokenizer import CHAT_TEMPLATE as DEMO

SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
)
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if rest is not sameas messages %}<|system|>{{ messages[0].content }}</s>{% endif %}"
    "{% set ns = namespace(i=0) %}"
    "{% for m in rest %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% set ns.i = ns.i + 1 %}"
    "{% elif m.role == 'system' %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
)
NO_SYSTEM = ALTERNATING.replace("<|system|>{{ messages[0].content }}</s>", "{{ raise_exception('no system') }}")
TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}</s>{% endfor %}<|assistant|>"
)
SHIPPED = {
    file.name: file.read_text("utf-8")
    for file in (files("paceline.logs") / "templates").iterdir() if file.name.endswith(".jinja")
}  # fmt: skip
TEMPLATES = {
    "plain": models.CHAT_TEMPLATE, "demo": DEMO, "system first": SYSTEM_FIRST, "alternating": ALTERNATING,
    "tools": TOOLS, **SHIPPED,
}  # fmt: skip
MARKS = [
    "<s>", "</s>", *(f"<|{name}|>" for name in ("user", "assistant", "system", "tool", "end", "im_start", "im_end")),
    "<|endoftext|>", "<tool_call>", "</tool_call>",
]  # fmt: skip
ALPHABET = sorted({letter for text in TEMPLATES.values() for letter in text if letter != " "} | set("0123456789?▁«»¶"))
Names = Callable[[str], str]


def other(text):
    """A template, or a mark, in which all marks have other names."""
    for mark, name in (("<|", "«"), ("|>", "»"), ("<s>", "«s»"), ("</s>", "«/s»"), ("tool_call>", "tool_call»")):
        text = text.replace(mark, name)
    return text


def byte_level(name):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=350, special_tokens=[*map(name, MARKS[:-2])], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator([*models.TEXT, *TEMPLATES.values()], trainer)
    for mark in MARKS[-2:]:
        backend.add_tokens([tokenizers.AddedToken(name(mark), special=False, rstrip=True)])
    backend.add_tokens(["\n\n"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=name("<s>"), eos_token=name("</s>"))


def unigram(name):
    """A SentencePiece model, which has its marks among its pieces."""
    marks = [*map(name, MARKS)]
    pieces = [("<unk>", 0.0), *((mark, 0.0) for mark in marks), *((letter, -3.0) for letter in ALPHABET)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([*pieces, ("▁1", -2.0), ("us", -2.0)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<unk>", *marks[:-2]])
    backend.add_tokens([*marks[-2:], "\n\n"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=name("<s>"), eos_token=name("</s>"))


KINDS = {"bytes": byte_level, "unigram": unigram}


def made(kind, template, name=str):
    inner = KINDS[kind](name)
    inner.chat_template = name(template)
    tokenizer = Tokenizer(inner, "tiny")
    tokenizer.show(MARKS[-2:])  # as a server does for its parsers' marks
    return tokenizer


def chat(text, template):
    """A conversation in which system, user, and, where the template knows them, tools say `text`."""
    messages = [
        {"role": "system", "content": text}, {"role": "user", "content": text},
        {"role": "assistant", "content": "3"}, {"role": "user", "content": text},
    ]  # fmt: skip
    if "tools" not in template:
        return messages, {}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "3"}}}
    messages[3:] = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": text}]
    return messages, {"tools": [{"type": "function", "function": {"name": "f", "description": text, text: [text]}}]}


@pytest.mark.parametrize(("kind", "name"), list(product(KINDS, TEMPLATES)))
def test_marks_in_peoples_text_have_the_ids_of_text(kind, name):
    """As in a tokenizer and a template in which all marks have other names, so that people's are none."""
    ours, theirs = made(kind, TEMPLATES[name]), made(kind, TEMPLATES[name], other)
    theirs.reads_marks = True
    for mark in MARKS:
        messages, options = chat(f"1 {mark} 2{mark}", TEMPLATES[name])
        ids = ours.encode_chat(messages, **options)
        assert ids == theirs.encode_chat(messages, **options)
        ours.reads_marks = True
        assert ids != ours.encode_chat(messages, **options)
        ours.reads_marks = False


@pytest.mark.parametrize(("kind", "name"), list(product(KINDS, TEMPLATES)))
def test_prompts_without_marks_are_as_before(kind, name):
    """Those of the templates themselves, and the encoder with other names makes the same of them."""
    tokenizer = made(kind, TEMPLATES[name])
    for text in ("1 ? 2", "a  b\n\nc <b> [1] <u>", ""):
        messages, options = chat(text, TEMPLATES[name])
        ids = tokenizer.encode_chat(messages, **options)
        own = tokenizer.inner.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
        )
        text = tokenizer.inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        assert tokenizer._marks is not None
        assert ids == own == tokenizer._marks.encode(text)


def test_marks_of_a_real_tokenizer(demo):
    tokenizer = load_tokenizer(demo)
    marks = [token.content for token in tokenizer.inner.added_tokens_decoder.values()]
    text = f"1 {' x '.join(marks)} 2"
    ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert tokenizer.inner.decode(ids) == tokenizer.render_chat([{"role": "user", "content": text}])
    assert len(tokenizer.encode_chat([{"role": "user", "content": "x"}])) < len(ids) - 3 * len(marks)


def test_the_assistants_own_marks_stay_but_those_that_no_answer_shows():
    tokenizer = made("bytes", models.CHAT_TEMPLATE)
    said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1 <tool_call>2</tool_call>\n</s>"}]
    (call, end, eos) = tokenizer.inner.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "</s>"])
    ids = tokenizer.encode_chat(said)
    assert [ids.count(i) for i in (call, end, eos)] == [1, 1, 2]
    tokenizer.show(["</s>"])  # as a parser does for its marks
    assert tokenizer.encode_chat(said).count(eos) == 3


# Messages that a template refuses ----------------------------------------------------------------------------------


def said(*turns):
    """Messages of turns such as "user: a"."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


CHATS = {
    # the messages; what they are to a template whose system message is first, to one that wants turns, and to one that
    # has no system message
    "two developers, two users": (
        said("developer: a", "developer: b", "user: c", "user: d"),
        said("system: a\n\nb", "user: c", "user: d"), said("system: a\n\nb", "user: c\n\nd"),
        said("user: a\n\nb\n\nc\n\nd"),
    ),
    "users in a row": (
        said("system: a", "user: b", "user: c"), None, said("system: a", "user: b\n\nc"), said("user: a\n\nb\n\nc"),
    ),
    "a system message in the middle": (
        said("system: a", "user: b", "assistant: c", "system: d", "user: e"),
        said("system: a", "user: b", "assistant: c", "user: d", "user: e"),
        said("system: a", "user: b", "assistant: c", "user: d\n\ne"),
        said("user: a\n\nb", "assistant: c", "user: d\n\ne"),
    ),
    "answers in a row": (
        said("user: a", "assistant: b", "assistant: c", "user: d"), None,
        *[said("user: a", "assistant: b\n\nc", "user: d")] * 2,
    ),
    "nothing to mend": (said("system: a", "user: b", "assistant: c", "user: d"), None, None,
                        said("user: a\n\nb", "assistant: c", "user: d")),
}  # fmt: skip


@pytest.mark.parametrize("case", CHATS)
def test_messages_that_a_template_refuses_are_joined_or_turned(case):
    messages, *expected = CHATS[case]
    for template, form in zip((SYSTEM_FIRST, ALTERNATING, NO_SYSTEM), expected, strict=True):
        wanted = messages if form is None else form
        tokenizer = made("bytes", template)
        ids, text = tokenizer.encode_chat(messages), tokenizer.render_chat(messages)
        assert text == "".join(f"<|{one['role']}|>{one['content']}</s>" for one in wanted) + "<|assistant|>"
        assert ids == tokenizer.encode_text(text)
    anything = made("bytes", models.CHAT_TEMPLATE).render_chat(messages)  # which refuses nothing
    developer = anything.replace("developer", "system")
    assert developer == "<s>" + "".join(
        f"<|{one['role'].replace('developer', 'system')}|>{one['content']}</s>" for one in messages
    ) + "<|assistant|>"


def test_what_is_refused_in_any_form_says_why_it_was_at_first():
    tokenizer = made("bytes", "{{ raise_exception('not ' + messages | length | string) }}")
    with pytest.raises(PromptError, match=r"refuses these messages: not 2$"):
        tokenizer.encode_chat(said("user: a", "user: b"))


def test_a_number_that_stands_for_no_mark_is_text():
    """A template's error may show a client such a number, who can write another one like it."""
    backend = byte_level(str).backend_tokenizer
    marks = Marks(backend, MARKS, ())
    hidden, _ = marks.hide([{"role": "user", "content": MARKS[0]}], {}) or ([], {})
    number = hidden[0]["content"][:-6] + "999999"
    assert marks.encode(number) == backend.encode(number, add_special_tokens=False).ids
