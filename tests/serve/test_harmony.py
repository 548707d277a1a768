"""What gpt-oss writes: channels are reasoning, text and calls; whole, cut at every character, and in the server."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.chats import Chats
from paceline.serve.harmony import HarmonyReader, with_thinking
from paceline.serve.reading import BARE, HARMONY, IN_HARMONY, REASONING, described, reasoning_marks
from paceline.serve.structure import Grammars
from tests import models
from tests.serve.live import engine, serving
from tests.serve.test_reading import TAKES, facts, read, streamed
from tests.serve.test_tools import SHAPE, TOOLS, USER, put_together

THOUGHT = "<|channel|>analysis<|message|>I add."
START = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_ADD = 'to=functions.add <|constrain|>json<|message|>{"x": 1}'
ADDED, SUBBED = ("add", '{"x": 1}'), ("sub", "{}")

ANSWERS = {
    # text of the answer: its content, its reasoning, its calls
    "thought and answer": (f"{THOUGHT}<|end|>{START}{FINAL}Three.<|return|>", "Three.", "I add.", []),
    "without its last mark": (f"{THOUGHT}<|end|>{START}{FINAL}Three. ", "Three. ", "I add.", []),
    "answer alone": (f"{FINAL}Three.", "Three.", "", []),
    "two thoughts": (f"{THOUGHT}<|end|>{START}{THOUGHT}<|end|>{START}{FINAL}3", "3", "I add.\n\nI add.", []),
    "an empty thought": (f"<|channel|>analysis<|message|><|end|>{START}{THOUGHT}<|end|>", "", "I add.", []),
    "thought without an end": (f"{THOUGHT}{START}{FINAL}3", "3", "I add.", []),
    "a preamble": (f"<|channel|>commentary<|message|>First.<|end|>{START}{FINAL}Then.", "First.\n\nThen.", "", []),
    "a call": (f"{THOUGHT}<|end|>{START}<|channel|>commentary {TO_ADD}<|call|>", "", "I add.", [ADDED]),
    "a call, its function first": (
        f'{START} to=functions.add<|channel|>commentary json<|message|>{{"x": 1}}<|call|>', "", "", [ADDED]
    ),
    "a call after the prompt's own start": (
        ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"x": 1}', "", "", [ADDED]
    ),
    "a call in the wrong channel": (f"<|channel|>analysis {TO_ADD}<|call|>", "", "", [ADDED]),
    "a call after text": (
        f"<|channel|>commentary<|message|>I add. <|end|>{START}<|channel|>commentary {TO_ADD}", "I add.", "", [ADDED]
    ),
    "two calls": (
        f"<|channel|>commentary {TO_ADD}<|call|>{START}<|channel|>commentary to=sub<|message|><|call|>", "", "",
        [ADDED, SUBBED],
    ),
    "not offered": ("<|channel|>commentary to=functions.rm<|message|>{}<|call|>", "{}", "", []),
    "broken": ('<|channel|>commentary to=functions.add<|message|>{"x": 1<|call|>', '{"x": 1', "", []),
    "a list": ("<|channel|>commentary to=functions.add<|message|>[1]<|call|>", "[1]", "", []),
    "cut in a header": (f"{THOUGHT}<|end|>{START}<|chan", "", "I add.", []),
    "cut in a header's name": (f"{THOUGHT}<|end|>{START}<|channel|>fin", "", "I add.", []),
    "without channels": ("Three.", "Three.", "", []),
    "nothing": ("", "", "", []),
    "a header without an end": ("<|channel|>" + "a" * 600, "a" * 600, "", []),
    "code in an answer": (f"{FINAL}to=1 <b> | <|x|>\n  y", "to=1 <b> | <|x|>\n  y", "", []),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_channels_are_read_alike_whole_and_in_pieces(case):
    text, *expected = ANSWERS[case]
    assert facts(read(HarmonyReader(names=TAKES), text)) == tuple(expected)
    for parts in (list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert facts(streamed(HarmonyReader(names=TAKES), parts)) == tuple(expected)


def test_one_call_where_one_is_wanted_and_none_that_do_not_fit():
    two = ANSWERS["two calls"][0]
    assert facts(read(HarmonyReader(names=TAKES, most=1), two)) == ("", "", [ADDED])
    strict = {"add": lambda arguments: "2" in arguments}
    assert facts(read(HarmonyReader(names=TAKES, strict=strict), ANSWERS["a call"][0])) == ('{"x": 1}', "I add.", [])


def test_a_call_that_a_grammar_forces_is_one_in_any_channel():
    call = '{"name": "add", "arguments": {"x": 1}}'
    for text in (f"{THOUGHT}<|end|>{START}{FINAL}{call}", call, f"{FINAL}{call}"):
        for parts in ([text], list(text)):
            assert facts(streamed(HarmonyReader([BARE], TAKES), parts))[2] == [ADDED]


FRAGMENTS = [
    *HARMONY, START, FINAL, "<|channel|>", "commentary", "analysis", "<|message|>", " to=functions.add",
    "<|constrain|>", '{"x": 1}', "{", "text", " ", "\n", "<|", "<|call|>", "<|return|>", "to=", "a" * 300,
]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10), st.integers(1, 9))
def test_any_text_is_read_alike_however_it_is_cut(parts, size):
    text = "".join(parts)
    found = []
    for cut in (len(text) or 1, size, 1):
        cuts = [text[at : at + cut] for at in range(0, len(text), cut)]
        found.append(facts(streamed(HarmonyReader(names=TAKES), cuts)))
    assert found[0] == found[1] == found[2]


def test_it_is_guessed_from_the_template():
    template = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    assert reasoning_marks("auto", template) == reasoning_marks("harmony", "") == REASONING["harmony"] == HARMONY
    assert reasoning_marks("auto", "<|assistant|>{{ x }}<|end|>") is None  # Phi's
    says = "tool calls are read as messages to functions; reasoning from <|channel|>analysis<|message|> to <|end|>"
    assert described("auto", "auto", template) == says
    assert described("none", "auto", template).startswith("tool calls are read as none")


def test_earlier_turns_have_what_the_template_reads():
    call = {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    said = {"role": "assistant", "content": "A.", "reasoning_content": "So."}
    assert with_thinking(said) == {"role": "assistant", "content": "A.", "thinking": "So."}
    assert with_thinking(said | call) == {"role": "assistant", "content": "", "thinking": "So.\n\nA.", **call}
    assert with_thinking(called := {"role": "assistant", "content": "A.", **call}) == called
    assert json.dumps(with_thinking({"role": "user", "content": "?"})) == '{"role": "user", "content": "?"}'


# Through the server ---------------------------------------------------------------------------------------------------

openai = pytest.importorskip("openai")
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary "
    "json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
SPECIAL = [*IN_HARMONY, "<|call|>", "<|return|>"]


@pytest.fixture(scope="module")
def harmonic(tmp_path_factory):
    """An engine of a model that has gpt-oss's special tokens and a template like its own."""
    folder = models.make("gpt-oss", tmp_path_factory.mktemp("m") / "tiny", max_position_embeddings=2048)
    made = engine(folder, max_batch=4)
    made.tokenizer.inner.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.tokenizer.inner.chat_template = TEMPLATE
    return made


def tokens_of(made, text):
    return made.tokenizer.inner.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def client(harmonic):
    harmonic.target.eos_token_ids = (models.EOS, *tokens_of(harmonic, "<|call|><|return|>"))
    with serving(harmonic) as where:
        yield openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0)


@pytest.fixture
def writes(monkeypatch, harmonic):
    """Says what the model writes next, special tokens as such."""

    def script(text):
        ids = tokens_of(harmonic, text)

        def allowed(answer, size):
            mask = torch.zeros(size, dtype=torch.bool)
            mask[ids[len(answer)] if len(answer) < len(ids) else models.EOS] = True
            return mask

        monkeypatch.setattr(Chats, "grammar", lambda *_: SimpleNamespace(allowed=allowed))

    return script


SERVED = {
    "thought and answer": ("Three.", "I add.", [], "stop"),
    "a call": ("", "I add.", [ADDED], "tool_calls"),
    "a call after text": ("I add.", "", [ADDED], "tool_calls"),
    "not offered": ("{}", "", [], "stop"),
    "without channels": ("Three.", "", [], "stop"),
}


@pytest.mark.parametrize("case", SERVED)
def test_whole_answers_and_streams_say_the_same(client, writes, case):
    writes(ANSWERS[case][0])
    ask = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 200}
    (choice,) = client.chat.completions.create(**ask).choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    assert (message.content or "", reasoning, calls, choice.finish_reason) == SERVED[case]
    assert put_together(client.chat.completions.create(**ask, stream=True))[:4] == SERVED[case]


def test_the_answer_of_a_turn_is_read_in_the_next(client, writes):
    """As clients send it back, with its reasoning; a template that refuses text beside it gets both as reasoning."""
    writes(ANSWERS["thought and answer"][0])
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    said = {"role": "assistant", "content": "I call.", "reasoning_content": "So.", "tool_calls": [call]}
    turns = [*USER, said, {"role": "tool", "tool_call_id": "a", "content": "3"}]
    done = client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS, max_tokens=200)
    assert done.choices[0].message.content == "Three."


def test_an_answer_goes_on_where_it_was_cut(client, writes):
    writes("ree.")
    begun = [*USER, {"role": "assistant", "content": "Th"}]
    more = {"extra_body": {"continue_final_message": True}}
    done = client.chat.completions.create(model="tiny", messages=begun, max_tokens=20, **more)
    assert done.choices[0].message.content == "ree."


def test_a_grammar_begins_in_the_final_channel(harmonic):
    """After reasoning nothing but the way into it may be written, and within reasoning the answer cannot end."""
    target, ends = harmonic.target, tokens_of(harmonic, "<|return|>")
    grammars = Grammars(harmonic.tokenizer, target.vocab_size, ends)
    grammar = grammars.after_reasoning(grammars.json_schema(SHAPE["json_schema"]["schema"]), HARMONY, False)
    whole = tokens_of(harmonic, f'{THOUGHT}<|end|>{START}{FINAL}{{"x": 1}}<|return|>')
    thought = len(tokens_of(harmonic, f"{THOUGHT}<|end|>"))
    way = len(tokens_of(harmonic, f"{START}{FINAL}"))
    for at, token in enumerate(whole):
        mask = grammar.allowed(whole[:at], target.vocab_size)
        assert mask[token]
        assert mask[ends].any() == (token in ends)
        assert (int(mask.sum()) == 1) or not thought <= at < thought + way
    direct = tokens_of(harmonic, '{"x": 1}')
    assert all(grammar.fresh().allowed(direct[:at], target.vocab_size)[token] for at, token in enumerate(direct))
    assert not grammar.allowed(tokens_of(harmonic, "<|channel|>"), target.vocab_size)[tokens_of(harmonic, "x")].any()
