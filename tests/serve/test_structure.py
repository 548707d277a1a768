"""Grammars: what they let through, what they refuse, where they fail, and where they begin."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from jsonschema import validate
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers import models as backends
from transformers import PreTrainedTokenizerFast

from paceline.core.sampling import SamplingParams
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.formats.tokenizer import Tokenizer
from paceline.logs.transcript import open_tokenizer
from paceline.serve.fields import Tool
from paceline.serve.structure import Closing, Grammars, _Answers
from paceline.serve.tools import schema
from tests import drafters, models
from tests.draft.folders import Folders, specs
from tests.draft.tongues import tongues
from tests.pairs import paired

MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}}
LATE = {"type": "object", "properties": {"a": MANY}, "required": ["a"], "additionalProperties": False}
FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def plain(folder):
    return Engine(folder, dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def tokenizer(plain):
    assert plain.tokenizer is not None
    return plain.tokenizer


def grammars(engine, white_space="limited"):
    assert engine.tokenizer is not None
    return Grammars(engine.tokenizer, engine.target.vocab_size, engine.target.eos_token_ids, white_space)


def takes(grammar, engine, text):
    """Whether an answer can be this text and end there."""
    ids, size = engine.tokenizer.encode_text(text), engine.target.vocab_size
    steps = all(bool(grammar.allowed(ids[:i], size)[token]) for i, token in enumerate(ids))
    return steps and bool(grammar.allowed(ids, size)[list(engine.target.eos_token_ids)].any())


@pytest.mark.parametrize(("text", "by"), [
    ('{"a":true}', "limited any none"), ('{"a": true}', "limited any"), ('{\n    "a": true\n}', "limited any"),
    ('{\n\t"a": true\n}', "limited any"), ('{"a":  true}', "any"), ('{\n\n"a": true}', "any"),
    ('{\n \n"a": true}', "any"), ('{"a": true', ""),
])
def test_white_space_between_the_parts_of_json(plain, text, by):
    for white_space in ("limited", "any", "none"):
        made = grammars(plain, white_space).json_schema(FLAG)
        assert takes(made, plain, text) == (white_space in by.split())
    with pytest.raises(PacelineError, match="--json-whitespace is 'two'; it can be limited, any, none"):
        grammars(plain, "two")


@pytest.mark.parametrize("drafter", ["none", "sam"])
def test_a_small_model_writes_no_pages_of_blanks(demo, drafter):
    engine = Engine(demo, drafter, dtype="float32", device="cpu", threads=1)
    params = SamplingParams(max_tokens=60, grammar=grammars(engine).json_schema(FLAG))
    (done,) = engine.generate([[{"role": "user", "content": "Is water wet? Answer in JSON."}]], params)
    assert done.finish_reason == "stop"
    assert isinstance(json.loads(done.text)["a"], bool)


@pytest.mark.parametrize("schema", [MANY, {"$ref": "#"}], ids=["800 properties", "of itself"])
def test_what_fails_at_its_beginning_is_refused(plain, schema):
    with pytest.raises(PacelineError, match="the JSON schema cannot be kept to"):
        grammars(plain).json_schema(schema)


def test_what_the_library_says_of_a_schema_is_one_short_line(plain):
    odd = {**MANY, "required": [1]}
    for refused in (grammars(plain).json_schema, lambda one: grammars(plain).either(one, FLAG)):
        with pytest.raises(PacelineError, match=r"cannot be kept to: .*equired") as caught:
            refused(odd)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


def test_what_fails_later_is_an_error_and_not_complete(plain, tokenizer):
    size, made = plain.target.vocab_size, grammars(plain).json_schema(LATE)
    well, ill = tokenizer.encode_text('{"a":'), tokenizer.encode_text('{"a":{')
    before = made.allowed(well, size)
    for _ in range(2):
        with pytest.raises(PacelineError, match="grammar failed"):
            made.allowed(ill, size)
        assert made.forced(ill) == []
        assert torch.equal(made.allowed(well, size), before)  # a draft that failed costs nothing


@pytest.mark.parametrize("drafter", ["none", "grammar", "sam"])
def test_a_row_whose_grammar_fails_ends_as_an_error_alone(folder, drafter):
    engine = Engine(folder, drafter, dtype="float32", device="cpu", threads=1)
    params = [SamplingParams(max_tokens=40, grammar=made) for made in (grammars(engine).json_schema(LATE), None)]
    ill, well = engine.generate(["the cat", "the dog"], params)
    assert ill.finish_reason == "error"
    assert "grammar failed" in ill.error
    assert well.finish_reason in ("stop", "length")


# Text that holds the name of a mark ----------------------------------------------------------------------------------

ADDED = ("<tool_call>", "</think>", "<｜tool▁call▁begin｜>", "Müller", "[X]", "    ", "word")


def added(demo):
    """With tokens that are not special: marks, and words."""
    inner = open_tokenizer(demo).inner
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    inner.add_tokens([AddedToken("[Y]", special=True, normalized=False)])
    return Tokenizer(inner)


def unigram():
    """Its vocabulary holds the marks, and would rather have them than letters."""
    names = ["<unk>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    backend = Backend(backends.Unigram([(name, -9.0 * (len(name) == 1)) for name in names], 0, byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    inner.add_tokens([AddedToken("<|user|>", special=True)])
    return Tokenizer(inner)


def merged():
    """Merges make a mark of its letters, and others take it as a part."""
    names = ["</s>", "<unk>", "<a>", "<a", "<a>b", *map(chr, range(32, 127))]
    merges, vocab = [("<", "a"), ("<a", ">"), ("<a>", "b")], {name: id for id, name in enumerate(names)}
    backend = Backend(backends.BPE(vocab, merges, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = {"eos_token": "</s>", "bos_token": "<a>", "unk_token": "<unk>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


TOKENIZERS = {
    "demo": lambda of: open_tokenizer(of("demo")), "added": lambda of: added(of("demo")),
    "gpt2": lambda of: open_tokenizer(of("shared") / "models" / "gpt2-tokenizer"),
    "stories260K": lambda of: open_tokenizer(of("shared") / "models" / "stories260K"),
    "tiny": lambda _: Tokenizer(models.tokenizer()), "unigram": lambda _: unigram(), "merged": lambda _: merged(),
    **{name: lambda _, name=name: tongues()[name] for name in ("bytes", "more bytes", "pieces")},
}  # fmt: skip


def written(grammar, ends, size, seed, begins=()):
    """Tokens of an answer, of which each is any that is allowed."""
    rng, answer = np.random.default_rng(seed), [*begins]
    while len(answer) < 100:
        token = int(rng.choice(np.flatnonzero(grammar.allowed(answer, size).numpy())))
        if token in ends:
            return answer
        answer.append(token)
    return answer


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_may_hold_the_name_of_any_token(name, request):
    """It is spelled in tokens of text; a mark itself comes nowhere, nor in free text."""
    tokenizer = TOKENIZERS[name](request.getfixturevalue)
    ends, size = [tokenizer.inner.eos_token_id], len(tokenizer.inner) + 3
    known, made = tokenizer.inner.added_tokens_decoder, Grammars(tokenizer, size, ends, "none")
    marks = [id for id, token in known.items() if token.content not in ("[X]", "    ", "word")]
    assert marks
    for token in known.values():
        text = f"a{token.content}b"
        flag = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
        for asked, value in (({"const": text}, text), ({"enum": [text]}, text), (flag, {text: 1})):
            grammar, answer = made.json_schema(asked), list[int]()
            while forced := grammar.forced(answer):
                answer += forced
            for ids in (answer, written(grammar, ends, size, 0), made.closing(grammar, asked, 99).forced([])):
                assert set(ids).isdisjoint(marks)
                assert json.loads(tokenizer.decode(ids)) == value
                assert grammar.is_whole(ids)
            assert made.fits(asked, json.dumps(value, ensure_ascii=False))
        free = made.json_schema({"type": "string"}).allowed(made._tokens.tokenize_str(f'"{token.content}'), size)
        assert free.sum() > 90
        assert not free[marks].any()


def test_a_letter_that_no_token_spells_is_an_error_and_no_end():
    tokenizer = merged()
    made = Grammars(tokenizer, len(tokenizer.inner), [0])
    for text in ("é", "aé"):
        with pytest.raises(PacelineError, match=r"grammar failed: token \d of the answer breaks it"):
            written(made.json_schema({"const": text}), [0], len(tokenizer.inner), 0)


def test_an_answer_that_breaks_its_grammar_is_an_error_and_no_end(plain, tokenizer):
    made, size = grammars(plain).json_schema(FLAG), plain.target.vocab_size
    ids, ends = tokenizer.encode_text('{"a": true}'), list(plain.target.eos_token_ids)
    for at in range(len(ids)):
        broken = [*ids[:at], *tokenizer.encode_text("x")]
        for _ in range(2):
            with pytest.raises(PacelineError, match=f"grammar failed: token {at} of the answer breaks it"):
                made.allowed(broken, size)
    for whole in (ids, [*ids, *ends[:1]], [*ids, *ids]):  # a draft may go on after the end
        assert made.allowed(whole, size).nonzero().flatten().tolist() == ends
    with pytest.raises(PacelineError, match="grammar failed"):
        made.allowed([*ids[:2], tokenizer.inner.convert_tokens_to_ids("<|user|>")], size)


FUZZED = ("added", "gpt2", "stories260K", "unigram")
LETTERS = ('"', "\\", "/", "é", "日本", "😀", "\n", "\t", "\u2028", "{", "]", "a", " ", "1", "<", "|", ">", ":", "'")


def asked(rng, mark):
    """A schema with a text in which a mark stands, with whatever else."""
    first, second = ("".join(rng.choice([*LETTERS, mark], 3)) for _ in range(2))
    text = f"{first}{mark}{second}"
    holds = {"type": "string", "pattern": f"^{re.escape(text)}[ab]{{1,2}}$"}
    named = {"properties": {text: {"type": "string", "maxLength": 5}}, "required": [text]}
    shapes = [
        {"const": text}, {"enum": [second, text, mark]}, {"anyOf": [{"const": [text]}, {"type": "boolean"}]},
        {"type": "object", **named, "additionalProperties": False}, {"type": "string", "maxLength": 5}, holds,
    ]  # fmt: skip
    return shapes[rng.integers(len(shapes))]


class Fuzzed:
    """A model with one of the tokenizers, whose added tokens are `added`."""

    def __init__(self, name, request):
        self.tokenizer = tokenizer = TOKENIZERS[name](request.getfixturevalue)
        at, size = request.getfixturevalue("tmp_path"), len(tokenizer.inner) + 3
        self.folders = Folders(at, vocab_size=size, max_position_embeddings=512)
        known, self.ends = tokenizer.inner.added_tokens_decoder, [tokenizer.inner.eos_token_id]
        self.added = [token.content for token in known.values()]
        self.marks = {id for id, token in known.items() if token.content not in ("[X]", "    ", "word")}
        self.grammars = Grammars(tokenizer, size, self.ends, "none")

    def answers(self, schemas, draft):
        """Answers to all schemas, each whole JSON that fits its own and has no mark."""
        engine = Engine(self.folders.target, draft, tokenizer=self.tokenizer, max_batch=8)
        same = SamplingParams(max_tokens=200, stop_token_ids=self.ends)
        params = [
            replace(same, temperature=float(i % 3), seed=i, grammar=self.grammars.json_schema(one))
            for i, one in enumerate(schemas)
        ]
        answers = engine.generate([[5, 6, 7, 8]] * len(schemas), params)
        for one, done in zip(schemas, answers, strict=True):
            assert done.finish_reason == "stop", (one, done.text, done.error)
            validate(json.loads(done.text), one)
            assert self.marks.isdisjoint(done.tokens[:-1])
        return [done.tokens for done in answers]


@pytest.mark.parametrize("name", FUZZED)
def test_a_text_with_a_mark_is_whole_json_whatever_drafts(name, request):
    made, rng = Fuzzed(name, request), np.random.default_rng(7)
    schemas = [asked(rng, str(rng.choice(made.added))) for _ in range(6)]
    drafts = [create("none"), create("grammar"), create("sam"), create("jacobi"), drafters.Random()]
    plain, *others = (made.answers(schemas, draft) for draft in drafts)
    assert others == [plain] * len(others)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FUZZED)
def test_every_mark_with_every_drafter(name, request):
    made, rng = Fuzzed(name, request), np.random.default_rng(8)
    schemas = [asked(rng, mark) for mark in made.added for _ in range(max(12, 36 // len(made.added)))]
    plain = made.answers(schemas, create("none"))
    for spec in specs().values():
        assert made.answers(schemas, create(spec.format_map(made.folders))) == plain, spec


# Where a grammar begins ----------------------------------------------------------------------------------------------


def after(engine, begin, end="</think>"):
    made = grammars(engine)
    return made.after_reasoning(made.json_schema(FLAG), (begin or "<think>", end), inside=not begin)


@pytest.mark.parametrize(("text", "begun", "may_begin"), [
    ('so</think>{"a":true}', True, False), ('so</think>\n\n{"a":true}', True, False),
    ('<think>so</think>\n\n{"a": true}', True, True), ('{"a":true}', False, True),
    ('so</think>\n{"a":true}', False, False), ("so</think>so", False, False), ("so {}", False, False),
    ("<think>so", False, False), ('<thin{"a":true}', False, False),
])
def test_where_a_grammar_begins(plain, text, begun, may_begin):
    """begun: an answer whose prompt has begun the reasoning can be this; may_begin: one that may begin it itself."""
    assert (takes(after(plain, ""), plain, text), takes(after(plain, "<think>"), plain, text)) == (begun, may_begin)


def test_nothing_is_masked_or_forced_within_reasoning(plain, tokenizer):
    made, size, ends = after(plain, ""), plain.target.vocab_size, list(plain.target.eos_token_ids)
    free = made.allowed(tokenizer.encode_text("so </thin"), size)
    assert not free[ends].any()  # an answer that ended here would have no JSON
    assert (int(free.sum()), made.forced(tokenizer.encode_text("so"))) == (size - len(ends), [])
    closed = tokenizer.encode_text('so</think>\n\n{"')
    assert made.forced(closed) == grammars(plain).json_schema(FLAG).forced(tokenizer.encode_text('{"'))
    assert made.allowed(tokenizer.encode_text("so"), size)[tokenizer.encode_text("{")[0]]  # and back again


@pytest.mark.parametrize(("temperature", "drafter"), paired([0.0, 1.0], ["sam", "grammar", "recycling", "jacobi"]))
def test_drafts_see_where_the_reasoning_ends(folder, plain, drafter, temperature):
    """The mark is one that this model writes by itself, so that it falls inside drafts."""
    params = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    (free,) = plain.generate(["the cat"], SamplingParams(**params, grammar=after(plain, "")))
    end = next(pair for i in range(12, 99) if (pair := free.text[i : i + 2]).isascii() and pair.isalnum())
    engine = Engine(folder, drafter, dtype="float32", device="cpu", threads=1)
    (drafted,), (expected,) = (
        one.generate(["the cat"], SamplingParams(**params, grammar=after(one, "", end))) for one in (engine, plain)
    )
    assert drafted.tokens == expected.tokens
    reasoning, mark, rest = expected.text.partition(end)
    assert mark
    assert free.text.startswith(reasoning + mark)
    assert rest.lstrip().startswith("{")


def test_a_forced_call_of_a_function_whose_schema_refers_to_itself(plain):
    parts = {"$defs": {"n": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"type": "object", **parts}}})
        for name in ("add", "sub")
    ]
    made = grammars(plain).json_schema(schema(tools))
    assert takes(made, plain, '{"name": "sub", "arguments": {"x": 3}}')
    assert not takes(made, plain, '{"name": "sub", "arguments": {"x": "3"}}')


# JSON that closes -----------------------------------------------------------------------------------------------------

STRING = {"type": "string"}
CLOSES = {
    "flag": FLAG,
    "any object": {"type": "object"},
    "strings": {"properties": {"s": STRING, "t": {"type": "array", "items": STRING}}, "required": ["s", "t"]}
    | {"type": "object"},
    "enum": {"type": "array", "items": {"enum": ["x", "a long word"]}, "minItems": 1, "maxItems": 3},
    "pattern": {"type": "string", "pattern": "^a*b$"},
    "number": {"type": "number", "minimum": 0, "maximum": 9},
    "of itself": {"$ref": "#/$defs/n", "$defs": {"n": {
        "type": "object", "properties": {"v": {"type": "number"}, "n": {"$ref": "#/$defs/n"}}, "required": ["v"]}}},
}  # fmt: skip


def closing(engine, schema, most):
    made = grammars(engine)
    return made.closing(made.json_schema(schema), schema, most)


@pytest.mark.parametrize("name", CLOSES)
def test_an_answer_closes_whatever_a_model_writes(plain, tokenizer, name):
    """Any legal token may come, at any number of tokens from the least on, and something always may."""
    schema, size, ends = CLOSES[name], plain.target.vocab_size, plain.target.eos_token_ids
    least = closing(plain, schema, 1000).least
    with pytest.raises(PacelineError, match=f"there are {least - 1} tokens .* which takes at least {least};"):
        closing(plain, schema, least - 1)
    for most in (least, least + 1, least + 2, least + 9, 30):
        if most < least:
            continue
        rng, made, answer = np.random.default_rng(most), closing(plain, schema, most), list[int]()
        while len(answer) < most:
            legal = np.flatnonzero(made.allowed(answer, size).numpy())
            token = int(rng.choice(legal))
            if token in ends:
                break
            answer.append(token)
        validate(json.loads(tokenizer.decode(answer)), schema)


def test_where_there_is_room_nothing_changes(plain, tokenizer):
    made, free, size = closing(plain, FLAG, 5000), grammars(plain).json_schema(FLAG), plain.target.vocab_size
    ids = tokenizer.encode_text('{"a": true}')
    for i in range(len(ids) + 1):
        assert torch.equal(made.allowed(ids[:i], size), free.allowed(ids[:i], size))
    assert not made.was_limited(ids)
    tight = closing(plain, FLAG, made.least)
    shortest = tight.forced([])
    for i in range(len(shortest)):
        assert tight.allowed(shortest[:i], size)[shortest[i]]
    assert tight.was_limited(shortest)
    assert tight.is_whole(shortest)


@pytest.mark.parametrize(("temperature", "drafter"), paired([0.0, 1.0], ["sam", "grammar", "recycling", "jacobi"]))
def test_drafts_see_how_many_tokens_are_left(folder, plain, drafter, temperature):
    schema = CLOSES["strings"]
    params = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    engine = Engine(folder, drafter, dtype="float32", device="cpu", threads=1)
    alone, drafted = (
        one.generate(["the cat"], SamplingParams(**params, grammar=closing(one, schema, 24)))[0]
        for one in (plain, engine)
    )
    assert alone.tokens == drafted.tokens
    validate(json.loads(alone.text), schema)


@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_leaves_room_for_what_has_to_close(plain, tokenizer, begun):
    made, size = grammars(plain), plain.target.vocab_size
    with pytest.raises(PacelineError, match="takes at least"):
        made.after_reasoning(closing(plain, FLAG, 12), ("<think>", "</think>"), inside=True)
    grammar = made.after_reasoning(closing(plain, FLAG, 60), ("<think>", "</think>"), inside=begun)
    rng, answer = np.random.default_rng(1), [] if begun else tokenizer.encode_text("<think>")
    while len(answer) < 60:
        token = int(rng.choice(np.flatnonzero(grammar.allowed(answer, size).numpy())))
        if token in plain.target.eos_token_ids:
            break
        answer.append(token)
    assert isinstance(json.loads(tokenizer.decode(answer).partition("</think>")[2])["a"], bool)
    assert grammar.was_limited(answer)


def test_what_is_kept_of_an_answer_that_is_limited_at_every_token_stays_small():
    """Not each of its beginnings: of 8,000 tokens these would be hundreds of megabytes, for each client that asks."""
    kept, number = _Answers(), 1000
    for i in range(number):
        kept.add([*range(i)])
    assert sum(map(sys.getsizeof, kept._seen)) < 100 * number
    assert kept.begin([*range(5)])
    assert not kept.begin([])
    assert not _Answers().begin([7, 8])


def test_a_long_closing_is_no_work_for_all_others(plain, monkeypatch):
    """Where every letter may decide whether a text of at least 300 letters closes, few tokens are tried, and each for
    few ends: one request must not hold up a round for half a second."""
    tried, made = 0, closing(plain, {"type": "string", "minLength": 300}, 700)
    whole = Closing._ends_with

    def counted(self, tokens):
        nonlocal tried
        tried += 1
        return whole(self, tokens)

    monkeypatch.setattr(Closing, "_ends_with", counted)
    rng, answer = np.random.default_rng(0), list[int]()
    for _ in range(12):
        answer.append(int(rng.choice(np.flatnonzero(made.allowed(answer, plain.target.vocab_size).numpy()))))
    assert tried < 12 * 20 * 40
