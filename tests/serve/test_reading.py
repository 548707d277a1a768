"""What is read out of an answer: reasoning, text and calls, whole and cut at every character."""

import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.serve.reading import BARE, REASONING, Reader, delta, described, message, reasoning_marks, tool_formats

ADD = '{"name": "add", "arguments": {"x": 1, "y": "}]"}}'
SUB = '{"name": "sub", "arguments": {}}'
X, Y = ("add", '{"x": 1, "y": "}]"}'), ("sub", "{}")
HERMES = f"<tool_call>\n{ADD}\n</tool_call>"

TAKES = {
    "add": {"properties": {"x": {"type": "integer"}, "y": {"type": "string"}, "z": {"anyOf": [{"type": "array"}]}}},
    "sub": None,
}
CALLED = ("add", '{"x": 2, "y": "a\\nb", "z": [1, "a"]}')
QWEN = (
    "<tool_call>\n<function=add>\n<parameter=x>\n2\n</parameter>\n<parameter=y>\na\nb\n</parameter>\n"
    '<parameter=z>\n[1, "a"]\n</parameter>\n</function>\n</tool_call>'
)
GLM = (
    "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n<arg_key>y</arg_key>\n<arg_value>a\nb</arg_value>\n"
    '<arg_key>z</arg_key>\n<arg_value>[1, "a"]</arg_value>\n</tool_call>'
)
PYTHON = "add(x=2, y='a\\nb', z=[1, \"a\"])"
DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEP_CALL = 'function<｜tool▁sep｜>add\n```json\n{"x": 2}\n```'

CALLS = {
    # text of the answer: what its content is, and which calls it has
    "none": (" just text, a < b [1] `c`\n", " just text, a < b [1] `c`\n", []),
    "empty": ("", "", []),
    "hermes": (HERMES, "", [X]),
    "hermes after text": (f"I add. \n{HERMES}", "I add.", [X]),
    "hermes, a backslash at the end": (
        HERMES.replace("}]", r"C:\\"), "", [("add", r'{"x": 1, "y": "C:\\"}')]
    ),
    "hermes, backslashes and a quote": (
        HERMES.replace("}]", r"\\\"}\\"), "", [("add", r'{"x": 1, "y": "\\\"}\\"}')]
    ),
    "llama 4, a backslash at the end": (r"[add(y='C:\\', x=2)]", "", [("add", r'{"y": "C:\\", "x": 2}')]),
    "hermes twice": (f"{HERMES}\n<tool_call>{SUB}</tool_call>\n", "", [X, Y]),
    "hermes, two in one": (f"<tool_call>\n{ADD}\n{SUB}\n</tool_call>", "", [X, Y]),
    "hermes, not closed": (f"<tool_call>\n{ADD}", "", [X]),
    "text between": (f"a {HERMES}\nb\n<tool_call>{SUB}</tool_call> c", "a\nb c", [X, Y]),
    "text after alone": (f"{HERMES}\n\nDone.", "Done.", [X]),
    "fenced": (f"Sure:\n```json\n{ADD}\n```\nDone.", "Sure:\nDone.", [X]),
    "fenced without a name": (f"```\n{SUB}\n```", "", [Y]),
    "other fences": ("```json\n{\"a\": 1}\n```\n```python\nx\n```", "```json\n{\"a\": 1}\n```\n```python\nx\n```", []),
    "bare": (f"\n{ADD}\n", "", [X]),
    "bare list, then text": (f"[{ADD}]\nSo.", "So.", [X]),
    "a list with one not offered": (f"[{ADD}, {ADD.replace('add', 'rm')}]", f", {ADD.replace('add', 'rm')}]", [X]),
    "bare list": (f"[{ADD}, {SUB}]", "", [X, Y]),
    "bare, not first": (f"So: {ADD}", f"So: {ADD}", []),
    "llama 3": ('{"name": "add", "parameters": {"x": 2}}; ' + SUB, "", [("add", '{"x": 2}'), Y]),
    "llama 3, a type": ('{"type": "function", "name": "add", "parameters": {"x": 2}}', "", [("add", '{"x": 2}')]),
    "llama 3, tag": (f"<|python_tag|>{ADD}", "", [X]),
    "python, tag": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "mistral": (f"[TOOL_CALLS] [{ADD}, {SUB}]", "", [X, Y]),
    "mistral, a name": ('ok[TOOL_CALLS]add[ARGS]{"x": 2}[TOOL_CALLS]sub{}', "ok", [("add", '{"x": 2}'), Y]),
    "mistral, an id": ('[TOOL_CALLS]add[CALL_ID]ab1[ARGS]{"x": 2}', "", [("add", '{"x": 2}')]),
    "two braces": ('{{"name": "add", "arguments": {"x": 2}}}', "", [("add", '{"x": 2}')]),
    "qwen3 coder": (f"ok\n{QWEN}", "ok", [CALLED]),
    "qwen3 coder, twice": (f"{QWEN}\n{QWEN}", "", [CALLED] * 2),
    "qwen3 coder, two in one": (QWEN.replace("</tool_call>", QWEN.removeprefix("<tool_call>")), "", [CALLED] * 2),
    "qwen3 coder, its end in an argument": (
        "<tool_call><function=add><parameter=y>a</function>\n</parameter></function></tool_call>", "",
        [("add", '{"y": "a</function>"}')],
    ),
    "qwen3 coder, an end in an argument": (
        "<tool_call><function=add><parameter=y>\na </parameter> b\n</parameter><parameter=x>1</parameter></function>",
        "", [("add", '{"y": "a </parameter> b", "x": 1}')],
    ),
    "qwen3 coder, a name in an argument": (
        "<tool_call><function=add><parameter=y>a<parameter=b>c</parameter></function></tool_call>", "",
        [("add", '{"y": "a<parameter=b>c"}')],
    ),
    "qwen3 coder, nothing": ("<tool_call>\n<function=sub>\n</function>\n</tool_call>", "", [Y]),
    "qwen3 coder, cut": (QWEN[:-30], QWEN[:-30], []),
    "qwen3 coder, not offered": (QWEN.replace("add", "rm"), QWEN.replace("add", "rm"), []),
    "qwen3 coder, the mark left out": (
        f"ok\n{QWEN[12:]}\nso", "ok\nso", [CALLED]
    ),
    "qwen3 coder, both marks left out, twice": (f"{QWEN[12:-12]}\n{QWEN[12:-12]}", "", [CALLED] * 2),
    "qwen3 coder, the mark left out after a call": (f"{QWEN}\n{QWEN[12:]}", "", [CALLED] * 2),
    "qwen3 coder, within a line": (f"as {QWEN[12:-13]}", f"as {QWEN[12:-13]}", []),
    "qwen3 coder, within an argument of another": (
        f"<tool_call>\n<function=rm>\n<parameter=x>\n{QWEN[12:-13]}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n<function=rm>\n<parameter=x>\n{QWEN[12:-13]}\n</parameter>\n</function>\n</tool_call>", [],
    ),
    "qwen3 coder, within an argument of another, no marks": (
        f"<function=rm>\n<parameter=x>\n{QWEN[12:-13]}\n</parameter>\n</function>",
        f"<function=rm>\n<parameter=x>\n{QWEN[12:-13]}\n</parameter>\n</function>", [],
    ),
    "qwen3 coder, after a fence": (f"```\nx\n```\n{QWEN[12:-13]}", "```\nx\n```", [CALLED]),
    "a list of tools": (f"<tools>\n{ADD}\n{SUB}\n</tools> ok", "ok", [X, Y]),
    "a list of tools, not of calls": (
        '<tools>\n{"name": "add", "parameters": {"x": 2}}\n</tools>',
        '<tools>\n{"name": "add", "parameters": {"x": 2}}\n</tools>', [],
    ),
    "a list of tools, with more": (
        '<tools>{"name": "add", "arguments": {"x": 2}, "description": "a"}</tools>',
        '<tools>{"name": "add", "arguments": {"x": 2}, "description": "a"}</tools>', [],
    ),
    "raw line breaks": (
        '<tool_call>\n{"name": "add", "arguments": {"y": "a\nb\t\\n\\\\", \n"x": 1}}\n</tool_call>', "",
        [("add", '{"y": "a\\nb\\t\\n\\\\", \n"x": 1}')],
    ),
    "raw line breaks, arguments first": (
        '<tool_call>{"arguments": {"y": "a\nb"}, "name": "add"}</tool_call>', "", [("add", '{"y": "a\\nb"}')]
    ),
    "raw line breaks, arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"y\\": \\"a\\nb\\"}"}</tool_call>', "",
        [("add", '{"y": "a\\nb"}')],
    ),
    "raw line breaks, named": ('[TOOL_CALLS]add[ARGS]{"y": "a\nb"}', "", [("add", '{"y": "a\\nb"}')]),
    "raw line breaks, in a value": (
        '<tool_call><function=add><parameter=z>["a\nb"]</parameter></function>', "", [("add", '{"z": ["a\\nb"]}')]
    ),
    "raw line breaks, deepseek": (
        DEEP + 'add<｜tool▁sep｜>{"y": "a\nb"}<｜tool▁call▁end｜>', "", [("add", '{"y": "a\\nb"}')]
    ),
    "glm": (GLM, "", [CALLED]),
    "glm, an end in an argument": (
        "<tool_call>add<arg_key>y</arg_key><arg_value>a </arg_value> b</arg_value>\n</tool_call>", "",
        [("add", '{"y": "a </arg_value> b"}')],
    ),
    "glm, nothing": ("<tool_call>sub\n</tool_call> so", "so", [Y]),
    "glm, no lines": (GLM.replace("\n", ""), "", [("add", '{"x": 2, "y": "ab", "z": [1, "a"]}')]),
    "glm, broken": ("<tool_call>add\n<arg_key>x</tool_call>", "<tool_call>add\n<arg_key>x</tool_call>", []),
    "llama 4": (f"<|python_start|>[{PYTHON}, sub()]<|python_end|>", "", [CALLED, Y]),
    "llama 4, bare": (f"[{PYTHON}]", "", [CALLED]),
    "llama 4, words of JSON": ("[add(x=null, z=[true])]", "", [("add", '{"x": null, "z": [true]}')]),
    "llama 4, no constant": ("[add(x=sub())]", "[add(x=sub())]", []),
    "llama 4, no name": ("[add(1)]", "[add(1)]", []),
    "llama 4, an end in an argument": ("[add(y=')' + \"'\")]", "[add(y=')' + \"'\")]", []),
    "llama 4, brackets": ("[add(y=')]\\')', z=[(1, 2)])]", "", [("add", '{"y": ")]\')", "z": [[1, 2]]}')]),
    "a list of words": ("[add, sub] or so", "[add, sub] or so", []),
    "deepseek": (f"ok{DEEP}{DEEP_CALL}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "ok", [("add", '{"x": 2}')]),
    "deepseek, twice": (
        f"{DEEP}{DEEP_CALL}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>{DEEP_CALL}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("add", '{"x": 2}')] * 2,
    ),
    "deepseek 3.1": (
        f'{DEEP}add<｜tool▁sep｜>{{"x": 2}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [("add", '{"x": 2}')]),
    "deepseek, none": ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", []),
    "arguments first": ('<tool_call>{"arguments": {"x":2}, "name": "add"}</tool_call>', "", [("add", '{"x": 2}')]),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"x\\": 2}"}</tool_call>', "", [("add", '{"x": 2}')]
    ),
    "arguments twice": (  # the last ones count, as in any JSON
        '{"name": "add", "arguments": {"x": 1}, "arguments": {"x": 2}}', "", [("add", '{"x": 2}')]
    ),
    "name twice": ('{"name": "add", "arguments": {}, "name": "sub"}', "", [Y]),
    "as it was written": ('{"name":"add","arguments":{"x":  2}}', "", [("add", '{"x":  2}')]),
    "not offered": (HERMES.replace("add", "rm"), HERMES.replace("add", "rm"), []),
    "not offered, named": ("[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    "not offered, bare": (ADD.replace("add", "rm"), ADD.replace("add", "rm"), []),
    "offered after not offered": (f"{HERMES.replace('add', 'rm')}{HERMES}", HERMES.replace("add", "rm"), [X]),
    "broken": ("<tool_call>{name: add}</tool_call>", "<tool_call>{name: add}</tool_call>", []),
    "broken, then well": (f"a\n<tool_call>{{\"x\": 1}}</tool_call>{HERMES}", 'a\n<tool_call>{"x": 1}</tool_call>', [X]),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', '<tool_call>{"name": "add"}</tool_call>', []),
    "an answer in JSON": ('{"a": {"name": "add"}}', '{"a": {"name": "add"}}', []),
    "a list in JSON": ("[1, 2] ", "[1, 2] ", []),
    "the beginning of a mark": ("a <tool_", "a <tool_", []),
    "a mark alone": ("a <tool_call>", "a <tool_call>", []),
}  # fmt: skip
NO_END = [
    f"<tool_call>{call}</tool_call>"
    for call in (
        "<function=add><parameter=x>1<parameter=y>2</parameter></function>",
        "<function=add><parameter=y>a\n<parameter=x>\n1\n</parameter></function>",
        "<function=add><parameter=y>a</parameter> <parameter=x>1<parameter=z>[2]</parameter></function>",
        "<function=sub><parameter=x>1<parameter=y>2</parameter></function>",
        "add<arg_key>x</arg_key><arg_value>1<arg_key>y</arg_key><arg_value>2</arg_value>",
        "sub<arg_key>x</arg_key><arg_value>1<arg_key>y</arg_key><arg_value>2</arg_value>",
    )
]
"""Calls in which an argument has no end: it is not known which arguments they have."""
CUT = ['<tool_call>{"name": "add", "arguments": {"x": 1', '{"name": "add", "arguments": {"x": 1,}} ',
       '<tool_call>{"name": "add", "arguments": {"y": "a\\\nb"}}</tool_call>',
       '[TOOL_CALLS]add[ARGS]{"x": [1}', '<tool_call>{"name": "add", "arguments": {}</tool_call>']  # fmt: skip
"""Calls that turn out broken when some of their arguments have been read."""
NO_NUMBERS = [
    text.replace("2", number) for number in ("NaN", "-Infinity", "1e999") for text in (
        '<tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>', '{"arguments": {"x": 2}, "name": "add"}',
        '[TOOL_CALLS]add[ARGS]{"x": 2}', DEEP + 'add<｜tool▁sep｜>{"x": 2}<｜tool▁call▁end｜>',
    )
]  # fmt: skip
"""Calls with a number that no answer in JSON can hold."""


def made(parser="auto", **options):
    return Reader(tool_formats(parser), TAKES, **options)


def read(reader, text):
    return message([*reader.push(text), *reader.end()])


def streamed(reader, parts):
    """The chunks of a stream, put together as clients do."""
    whole = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": {}}
    for pieces in (*map(reader.push, parts), reader.end()):
        chunk = delta(pieces)
        for field in ("content", "reasoning_content"):
            whole[field] += chunk.get(field, "")
        for call in chunk.get("tool_calls", []):
            assert call["index"] == len(whole["tool_calls"])
            whole["tool_calls"][call["index"]] = call["function"]
    return whole


def facts(one):
    calls = one.get("tool_calls") or []
    functions = calls.values() if isinstance(calls, dict) else [call["function"] for call in calls]
    listed = [(function["name"], function["arguments"]) for function in functions]
    return one["content"] or "", one.get("reasoning_content") or "", listed


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_read_alike_whole_and_in_pieces(case):
    text, content, calls = CALLS[case]
    reader = made()
    assert (facts(read(reader, text)), reader.called) == ((content, "", calls), len(calls))
    assert facts(streamed(made(), list(text))) == (content, "", calls)
    for at in range(len(text)):
        assert facts(streamed(made(), [text[:at], text[at:]])) == (content, "", calls)


@pytest.mark.parametrize("text", NO_END)
def test_an_argument_without_an_end_is_no_other_call(text):
    whole = f"{text} {HERMES}"
    for parts in ([whole], list(whole), [text, f" {HERMES}"]):
        reader = made()
        assert facts(streamed(reader, parts)) == (text, "", [X])
        assert reader.called == 1


@pytest.mark.parametrize("text", CUT + NO_NUMBERS)
def test_a_broken_call_comes_back_as_text(text):
    whole = read(made(), text)
    assert facts(whole) == (text, "", [])
    for parts in ([text], list(text)):
        reader = made()
        assert facts(streamed(reader, parts)) == (text, "", [])
        assert not reader.called  # so that the stream does not end with tool_calls


@pytest.mark.parametrize("text", [
    HERMES, QWEN, GLM, ADD, "[TOOL_CALLS]add[ARGS]{}", f"[{PYTHON}]", f"{DEEP}{DEEP_CALL}<｜tool▁call▁end｜>",
])
def test_text_is_streamed_as_it_comes_and_a_call_when_it_is_whole(text):
    reader = made()
    lead = [] if text.startswith(("{", "[a")) else [delta(reader.push(part)) for part in ("I ad", "d. ")]
    assert lead in ([], [{"content": "I ad"}, {"content": "d."}])
    chunks = [delta(reader.push(char)) for char in text] + [delta(reader.end())]
    (whole,) = [chunk for chunk in chunks if chunk]
    (call,) = whole["tool_calls"]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "add")
    assert call["id"].isalnum()
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_one_format_reads_no_other():
    assert facts(read(made("mistral"), HERMES)) == (HERMES, "", [])
    assert facts(read(made("hermes"), ADD)) == (ADD, "", [])
    assert facts(read(made("none"), HERMES)) == (HERMES, "", [])
    listed = f"<tools>{ADD}</tools>"  # models that write calls as Hermes does take it for the mark
    assert facts(read(made("hermes"), listed)) == ("", "", [X])
    assert facts(read(made("llama3"), listed)) == (listed, "", [])
    assert facts(read(Reader([BARE], ["add"]), ADD)) == ("", "", [X])


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"type": "integer"}, "2", 2), ({"type": "number"}, "2", 2), ({"type": "integer"}, "2.5", "2.5"),
    ({"type": "string"}, "2", "2"), (None, "2", "2"), ({}, "null", "null"), ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "None", None), ({"type": ["string", "null"]}, "x", "x"),
    ({"$ref": "#/$defs/P"}, '{"a": 1}', {"a": 1}), ({"enum": [1, 2]}, "1", 1), ({"type": "object"}, "{a", "{a"),
])
def test_a_written_value_is_of_its_schemas_type(schema, text, value):
    takes = {"add": {"properties": {"x": schema}}}
    written = f"<tool_call><function=add><parameter=x>{text}</parameter></function></tool_call>"
    ((_, arguments),) = facts(read(Reader(tool_formats("qwen3_coder"), takes), written))[2]
    assert json.loads(arguments) == {"x": value}


def test_a_call_that_never_ends_costs_little():
    for text in ("[add(" + ")" * 50_000, "[add(y='" + ")" * 50_000, QWEN[:-24] + "x</function>" * 5000,
                 GLM[:-13] + "x</tool_call>" * 5000, DEEP + DEEP_CALL + "x<｜tool▁call▁end｜>" * 5000):  # fmt: skip
        began = process_time()
        read(made(), text)
        assert process_time() - began < 2
    for text in ("[", "<tool_call>", "[TOOL_CALLS]"):
        began, reader = process_time(), made()
        content = [reader.push(part) for part in (text, *["abcdef"] * 20_000)]
        assert process_time() - began < 2
        assert len(content[-1]) == 1  # what is no call is not held back


def test_one_call_where_one_is_wanted():
    for text in (f"[TOOL_CALLS] [{ADD}, {SUB}]", f"{HERMES}\n<tool_call>{SUB}</tool_call>", f"{ADD};{SUB}"):
        assert facts(read(made(most=1), text)) == ("", "", [X])
        assert facts(streamed(made(most=1), list(text))) == ("", "", [X])


THOUGHTS = {
    # text, whether the prompt began the reasoning: content, reasoning, number of calls
    "closed": ("<think>\na < b\n</think>\n\nYes. ", False, ("Yes. ", "a < b", 0)),
    "begun by the prompt": ("a</think>b", True, ("b", "a", 0)),
    "not closed": ("<think>a\n", False, ("", "a", 0)),
    "not closed, begun": ("a <", True, ("", "a <", 0)),
    "none": (" well <think>a</think>", False, (" well <think>a</think>", "", 0)),
    "nearly": ("<thin", False, ("<thin", "", 0)),
    "empty": ("<think>\n\n</think>\n\nYes", False, ("Yes", "", 0)),
    "a call within": (f"<think>{HERMES}</think>no", False, ("no", HERMES, 0)),
    "a call after": (f"<think>so</think>\n{HERMES}", False, ("", "so", 1)),
    "a bare call after": (f"so</think>\n{ADD}", True, ("", "so", 1)),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_reasoning_is_split_off_alike_whole_and_in_pieces(case):
    text, inside, (content, reasoning, calls) = THOUGHTS[case]
    for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        found = facts(streamed(made(reasoning=REASONING["think"], inside=inside), parts))
        assert (*found[:2], len(found[2])) == (content, reasoning, calls)
    whole = facts(read(made(reasoning=REASONING["think"], inside=inside), text))
    assert (*whole[:2], len(whole[2])) == (content, reasoning, calls)


def test_what_is_split_off_is_guessed_from_the_template():
    assert reasoning_marks("auto", "{{ x.split('</think>') }}") == ("<think>", "</think>")
    assert reasoning_marks("auto", "{{ x }}") is None
    assert reasoning_marks("none", "</think>") is None
    assert reasoning_marks("mistral", "")[0] == "[THINK]"
    for name, template in (("hermes", ""), ("qwen3_coder", "<function="), ("glm45", "<arg_key>")):
        assert f"the chat template has {name}" in described("auto", "auto", "<tool_call>" + template)
    assert described("llama3", "none", "") == "tool calls are read as llama3; reasoning is not split off"
    for names in (("xml", "auto"), ("auto", "xml")):
        with pytest.raises(PacelineError, match="is 'xml'; it can be auto"):
            described(*names, "")


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "```json", "```", "<|python_tag|>", "<think>", "</think>",
    "\n", " ", "{", "}", "[", "]", ",", ";", '"', "add", "rm", "text", ADD, SUB, '{"name": "add", "arguments": {', "{{",
    "<function=add>", "<parameter=x>", "</parameter>", "</function>", "<arg_key>", "add(", "x=1", ")", "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    QWEN, GLM, PYTHON, DEEP_CALL, QWEN[12:-13], "<tools>", "</tools>", "<function=", "\n<function=sub></function>",
    '"name"', ":", '{"arguments": {}, "name": "sub"}', '"parameters": {}', "\\", "<", "`",
]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10), st.integers(1, 7), st.booleans(), st.sampled_from([None, 1]))
def test_any_text_is_read_alike_however_it_is_cut(parts, size, inside, most):
    text = "".join(parts)
    found = []
    for cut in (len(text) or 1, size, 1):
        reader = made(reasoning=REASONING["think"], inside=inside, most=most)
        whole = streamed(reader, [text[at : at + cut] for at in range(0, len(text), cut)])
        found.append((whole["content"], whole["reasoning_content"], reader.called))
    assert found[0] == found[1] == found[2]
    if not found[0][2]:  # without calls nothing is lost but white space and the marks of reasoning
        lost = len("".join(text.split())) - len("".join((found[0][0] + found[0][1]).split()))
        assert lost in (0, len("<think>"), len("</think>"), len("<think></think>"))
