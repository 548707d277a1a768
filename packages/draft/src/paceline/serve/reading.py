"""Reads what a model writes: its reasoning, its text and its tool calls, whole or as a stream.

    reader = Reader(formats=tool_formats("auto"), names=["add"])
    pieces = reader.push("I add.\\n<tool_call>") + ... + reader.end()
    answer = message(pieces)

The same reader serves whole answers and streams, so both read alike however the text is cut. Text that looks like a
call but is not, such as broken JSON or a function that was not offered, comes back as text. A call is held back until
it is whole, because clients cannot be told to forget a call that has begun."""

import ast
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import uuid4

from paceline.core.request import overlap
from paceline.errors import PacelineError
from paceline.jsonl import NotJSON, loads


@dataclass(frozen=True)
class Writing:
    """A way to write a call other than as a JSON object.

    begin   beginning of a call, with the function's name as its group; so_far: text that may still become `begin`.
    end     end of a call; stays: whether this end is also the format's `close`.
    read    returns the arguments, given the text between and the function's schema;
            None if they are not whole or broken."""

    begin: re.Pattern[str]
    so_far: re.Pattern[str]
    end: str
    read: Callable[[str, Mapping[str, Any]], dict[str, Any] | None]
    stays: bool = False


@dataclass(frozen=True)
class Format:
    """A format of calls: one of `opens`, then JSON objects with a name and arguments (or parameters), alone or in a
    list, then `close`, which may be missing.

    bare     whether an answer that begins with such an object is a call.
    named    whether calls may also be a name, [ARGS] and the arguments.
    heads    beginnings of a call whose mark the model left out; they count only at the beginning of a line.
    bound    whether a call has nothing but name and arguments, so that a repeated list of tools is no call.
    written  other ways to write calls.
    inner    marks within calls, which tell the format from others with the same `opens`.
    after    mark that ends all calls."""

    opens: tuple[str, ...]
    close: str = ""
    bare: bool = False
    named: bool = False
    heads: tuple[str, ...] = ()
    bound: bool = False
    written: tuple[Writing, ...] = ()
    inner: tuple[str, ...] = ()
    after: str = ""


def _elements(name: str, begin: str, end: str) -> Callable[[str, Mapping[str, Any]], dict[str, Any] | None]:
    """Make a function that reads a sequence of arguments, each a name and a value between `begin` and `end`. `end`
    within a value is text; another argument's name within a value shows that an `end` is missing."""
    one = re.compile(rf"\s*{name}\s*{begin}(.*?){end}\s*(?={name}|\Z)", re.DOTALL)
    names = re.compile(name, re.DOTALL)

    def read(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        made, at, known = {}, len(text) - len(text.lstrip()), schema.get("properties") or {}
        while at < len(text):
            if (found := one.match(text, at)) is None:
                return None
            if any(not known or other in known for other in names.findall(found[2])):
                return None
            made[found[1]] = _typed(found[2], known.get(found[1]))
            at = found.end()
        return made

    return read


def _kinds(schema: Any) -> set[str]:
    """Types that a schema allows for a value, as far as it says."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type", [])
    either = (one for name in ("anyOf", "oneOf") for one in schema.get(name) or [])
    values = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    refers = {"object", "array"} if "$ref" in schema else set()
    said = {kinds} if isinstance(kinds, str) else set(kinds)
    inner = {kind for one in either for kind in _kinds(one)}
    return (said or {_KINDS[type(value)] for value in values}) | refers | inner


_KINDS = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"
}  # fmt: skip


def _typed(text: str, schema: Any) -> Any:
    """Read a value that is written plainly if it is a text, else as JSON."""
    kinds = _kinds(schema)
    if kinds - {"string"}:
        word = text.strip()
        with suppress(NotJSON):
            value = parsed_value({"True": "true", "False": "false", "None": "null"}.get(word, word))
            if _KINDS[type(value)] in kinds or (type(value) is int and "number" in kinds):
                return value
    return text


def _pythonic(text: str, _: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read arguments in Python's form: x=1, y="a". Returns None if they are broken."""
    try:
        call = _Words().visit(ast.parse(f"f({text})", mode="eval").body)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        return parsed_value(json.dumps(given)) if None not in given else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, NotJSON):
        return None


class _Words(ast.NodeTransformer):
    """Replaces JSON's words (true, false, null) by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _fenced(text: str, _: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a JSON object, which may end with a code fence. Returns None if it is broken."""
    try:
        value = parsed_value(text.strip().removesuffix("```"))
    except NotJSON:
        return None
    return value if isinstance(value, dict) else None


QWEN_XML = Writing(
    re.compile(r"<function=([^>\s]+)>"), re.compile(r"<(?:f[a-z]*(?:=[^>\s]*)?)?"), "</function>",
    _elements("<parameter=([^>]+)>", r"\n?", r"\n?</parameter>"),
)  # fmt: skip
GLM_XML = Writing(
    re.compile(r"([\w.-]+)\s*(?=<arg_key>|</tool_call>)"), re.compile(r"[\w.-]+\s*(?:<[a-z_/]*)?"), "</tool_call>",
    _elements("<arg_key>(.*?)</arg_key>", "<arg_value>", "</arg_value>"), stays=True,
)  # fmt: skip
PYTHONIC = Writing(re.compile(r"([\w.-]+)\("), re.compile(r"[\w.-]+"), ")", _pythonic)
DEEPSEEK = Writing(
    re.compile(
        r"(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\s*```json\s*)(?=\{)"
    ),
    re.compile(r"(?:<｜?[a-z▁]*(?:｜>?)?)?\s*[\w.-]*(?:<｜?[a-z▁]*(?:｜>?)?)?[\w.-]*\s*`{0,3}[json]*\s*"),
    "<｜tool▁call▁end｜>", _fenced, stays=True,
)  # fmt: skip

FORMATS = {
    "hermes": Format(("<tool_call>",), "</tool_call>"),
    "json": Format(("```json", "```\n"), "```", bare=True),
    "llama3": Format(("<|python_tag|>",), bare=True),
    "mistral": Format(("[TOOL_CALLS]",), named=True),
    "qwen3_coder": Format(("<tool_call>",), "</tool_call>", heads=("<function=",), written=(QWEN_XML,),
                          inner=("<function=",)),
    "glm45": Format(("<tool_call>",), "</tool_call>", written=(GLM_XML,), inner=("<arg_key>", "</arg_key>",
                    "<arg_value>", "</arg_value>")),
    "llama4": Format(("<|python_start|>",), "<|python_end|>", bare=True, written=(PYTHONIC,)),
    "deepseek": Format(("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), "<｜tool▁call▁end｜>", written=(DEEPSEEK,),
                       inner=("<｜tool▁sep｜>",), after="<｜tool▁calls▁end｜>"),
}  # fmt: skip
LISTED = Format(("<tools>",), "</tools>", bound=True)  # Small models repeat this mark from the prompt's list of tools.
BARE = Format((), bare=True)  # A grammar forces this: a call and nothing else.
HARMONY = ("<|channel|>analysis<|message|>", "<|end|>")
FINAL = "<|start|>assistant<|channel|>final<|message|>"
IN_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""Its special tokens, beside those that end an answer. `harmony.py` reads what is written with them."""
REASONING = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "harmony": HARMONY,
}

LONGEST = 512  # Most characters before a call's arguments: an endless name must not be read again for each token.
MOST_ENDS = 64  # Most ends of a call to try, since each try reads it from its beginning.
_HEAD = re.compile(r'\{\{?\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\{)")
_NAMED_MARKS = ("[CALL_ID]", "[ARGS]")
_NAMED_SO_FAR = re.compile(r"[\w.-]*(?:\[[A-Z_]*(?:\]\w*)?)*")
_KEY = re.compile(r'\{\{?\s*(?:"(name|arguments|parameters|type|id)"|("[^"]*"|[^\s"{]))')
_LIST_END = re.compile(r"^\s*\]")
_BETWEEN = re.compile(r"[\s,;\[\]]*")


def tool_formats(parser: str) -> tuple[Format, ...]:
    """The formats of --tool-parser. Raises PacelineError for an unknown name."""
    if parser == "auto":
        return (*FORMATS.values(), LISTED)
    if parser != "none" and parser not in FORMATS:
        raise PacelineError(f"--tool-parser is {parser!r}; it can be auto, {', '.join(FORMATS)} or none")
    return () if parser == "none" else (FORMATS[parser], *[LISTED] * (parser == "hermes"))


def reasoning_marks(parser: str, template: str) -> tuple[str, str] | None:
    """The marks around reasoning, by --reasoning-parser. auto: marks that the chat template mentions."""
    if parser == "auto":
        other = (marks for marks in REASONING.values() if marks[1] in template and marks != HARMONY)
        return HARMONY if HARMONY[0] in template else next(other, None)
    if parser != "none" and parser not in REASONING:
        raise PacelineError(f"--reasoning-parser is {parser!r}; it can be auto, {', '.join(REASONING)} or none")
    return REASONING.get(parser)


def all_marks(formats: Iterable[Format], reasoning: tuple[str, str] | None) -> list[str]:
    """Every mark to look for."""
    own = (mark for one in formats for mark in (*one.opens, one.close, *one.inner, one.after))
    return [*filter(None, own), *_NAMED_MARKS, *(reasoning or ()), *(IN_HARMONY if reasoning == HARMONY else ())]


def usual_marks(template: str) -> list[str]:
    """Every mark to look for by a server's default options."""
    return all_marks(tool_formats("auto"), reasoning_marks("auto", template))


def described(tool_parser: str, reasoning_parser: str, template: str) -> str:
    """Both parsers in words, for the server's start."""
    tool_formats(tool_parser)  # This raises PacelineError for an unknown name.
    read, marks = tool_parser, reasoning_marks(reasoning_parser, template)
    if read != "none" and marks == HARMONY:
        read = "messages to functions"
    elif read == "auto":
        own = [name for name, one in FORMATS.items() if any(mark in template for mark in one.inner or one.opens)]
        read = f"auto ({', '.join(FORMATS)}; the chat template has {own[-1] if own else 'none of them'})"
    split = f"from {marks[0]} to {marks[1]}" if marks else "is not split off"
    return f"tool calls are read as {read}; reasoning {split}"


class Piece(NamedTuple):
    """kind: "reasoning" or "content" with text; "call" with a function's name, which all its "arguments" follow.
    number: which call of the answer."""

    kind: str
    text: str
    number: int = 0


class _Nesting:
    """Finds the end of a JSON object or list, or of a Python call's arguments, in a growing text. end: index after it,
    0 until it is found."""

    def __init__(self, at: int, *, python: bool = False):
        self.at, self.end = at, 0
        self._depth, self._quote, self._escaped = 0, "", False
        self._quotes, self._opens, self._closes = ("'\"", "{[(", "}])") if python else ('"', "{[", "}]")

    def read(self, text: str) -> str:
        """Read the new part of the text, up to the end.

        Returns the part with control characters in strings escaped, because models write plain line breaks there."""
        clean = []
        while not self.end and self.at < len(text):
            char = text[self.at]
            self.at += 1
            clean.append(json.dumps(char)[1:-1] if char < " " and self._quote else char)
            if self._quote:
                if char == self._quote and not self._escaped:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in self._quotes:
                self._quote = char
            elif char in self._opens:
                self._depth += 1
            elif char in self._closes:
                self._depth -= 1
                self.end = 0 if self._depth else self.at
        return "".join(clean)


Waiting = Generator[None, None, None]
ArgumentChecks = Mapping[str, Callable[[str], bool]]
NO_CHECKS: ArgumentChecks = MappingProxyType({})


class Reader:
    """Reads one answer.

    formats    formats of calls.
    names      names of the offered functions, or a mapping to their schemas.
    reasoning  marks that begin and end reasoning; inside: whether the prompt has begun it.
    most       most calls to read; text after them is left out.
    strict     checks of arguments, by function. A call whose arguments do not fit is no call.
    called     number of calls read so far."""

    def __init__(
        self, formats: Sequence[Format] = (), names: Iterable[str] | Mapping[str, Any] = (),
        reasoning: tuple[str, str] | None = None, *,
        inside: bool = False, most: int | None = None, strict: ArgumentChecks = NO_CHECKS,
    ):  # fmt: skip
        self._formats, self._most = formats, most
        self._names = names if isinstance(names, Mapping) else dict.fromkeys(names)
        self._strict = strict
        self._marks, self._inside = reasoning, inside
        self._text, self._over = "", False  # Text not read yet, and whether it is the last.
        self._held = ""  # White space held back; it is dropped beside calls and reasoning.
        self.called, self._said = 0, False
        self._odd = False  # Whether there was a mark without a call.
        self._out: list[Piece] = []
        self._steps = self._read()

    def push(self, text: str) -> list[Piece]:
        """Read more of the answer's text."""
        self._text += text
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    def end(self) -> list[Piece]:
        """Read the end of the answer."""
        self._over = True
        return self.push("")

    # Each of these generators yields when it needs more text ------------------------------------------------------

    def _read(self) -> Waiting:
        if self._marks is not None:
            yield from self._reasoning(*self._marks)
        if any(one.bare for one in self._formats):
            yield from self._space()
            if self._text.startswith(("{", "[")):
                written = [way for one in self._formats if one.bare for way in one.written]
                yield from self._calls("", replace(BARE, written=tuple(written)))
        opens: dict[str, Format] = {}
        for one in self._formats:
            for mark in one.opens:
                known = opens.setdefault(mark, one)
                opens[mark] = known if known is one else replace(known, written=(*known.written, *one.written))
        heads = {mark: one for one in self._formats for mark in one.heads}
        ends = {one.after for one in self._formats if one.after}
        while self._most is None or self.called < self._most:
            mark = yield from self._until("content", (*opens, *heads, *ends))
            if not mark:
                break
            if mark in opens:
                yield from self._calls(mark, opens[mark])
            elif mark in heads:
                yield from self._headed(mark, heads[mark])
            elif not self.called:
                self._say("content", mark)
        if self._held and not self.called:
            self._out.append(Piece("content", self._held))

    def _reasoning(self, begin: str, end: str) -> Waiting:
        """Read reasoning, if the answer begins with it, without the white space around it."""
        if not self._inside:
            yield from self._space()
            while begin != self._text and begin.startswith(self._text) and not self._over:
                yield
            if not self._text.startswith(begin):
                return
            self._text = self._text[len(begin) :]
        yield from self._space()
        self._held = ""
        yield from self._until("reasoning", (end,))
        yield from self._space()
        self._held = ""

    def _space(self) -> Waiting:
        """Hold white space back, up to other text or the end."""
        while True:
            rest = self._text.lstrip()
            self._held += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if rest or self._over:
                return
            yield

    def _until(self, kind: str, marks: tuple[str, ...]) -> Generator[None, None, str]:
        """Hand out text up to the first of `marks`. Returns this mark, "" if the answer ends without one."""
        while True:
            at, mark = min(((at, mark) for mark in marks if (at := self._text.find(mark)) >= 0), default=(-1, ""))
            if mark:
                self._say(kind, self._text[:at])
                self._text = self._text[at + len(mark) :]
                return mark
            may_begin = 0 if self._over else max((overlap(self._text, mark) for mark in marks), default=0)
            safe = len(self._text) - may_begin
            self._say(kind, self._text[:safe], hold=bool(marks))
            self._text = self._text[safe:]
            if self._over:
                return ""
            yield

    def _say(self, kind: str, text: str, hold: bool = True) -> None:
        """Hand out text. hold: whether white space at its end is held back."""
        text = self._held + text
        if kind == "content" and self.called and not self._said:
            text = text.lstrip()
        safe = len(text.rstrip()) if hold else len(text)
        self._held = text[safe:]
        if safe:
            self._out.append(Piece(kind, text[:safe]))
            self._said = self._said or kind == "content"

    def _calls(self, mark: str, form: Format) -> Waiting:
        """Read the calls after a mark. If there is no call, the mark and the text after it are text."""
        while self._most is None or self.called < self._most:
            between = yield from self._between(form.close)
            if not mark and form.close and self._text.startswith(form.close):
                self._text = self._text[len(form.close) :]
                return
            if not (yield from self._call(form)):
                if mark:
                    self._odd = self._odd or mark.startswith("<")  # A code fence is no sign of a call.
                    self._say("content", mark)
                elif self.called:
                    between = _LIST_END.sub("", between)
                self._text = between + self._text
                return
            mark, self._held = "", ""

    def _headed(self, head: str, form: Format) -> Waiting:
        """Read calls whose mark is missing. There are none if text precedes `head` on its line, or if the answer had a
        broken call before, of which `head` may be a part."""
        before, self._text = self.called, head + self._text
        if not self._odd and ("\n" in self._held or not self._said):
            yield from self._calls("", form)
            self._odd = self.called == before
        if self.called == before:
            self._say("content", head)
            self._text = self._text[len(head) :]

    def _between(self, close: str) -> Generator[None, None, str]:
        """Skip the text between calls, and return it."""
        skipped = ""
        while True:
            end = _BETWEEN.match(self._text).end()  # type: ignore[union-attr]
            skipped, self._text = skipped + self._text[:end], self._text[end:]
            if self._over or (self._text and (close == self._text or not close.startswith(self._text))):
                return skipped
            yield

    def _call(self, form: Format) -> Generator[None, None, bool]:
        """Take a call from the beginning of the text. Returns False, and takes nothing, if there is none."""
        head, key = None, None
        if self._text.startswith("{"):
            while (key := _KEY.match(self._text)) is None and not self._over:
                yield
        for way in form.written:
            while len(self._text) < LONGEST and way.so_far.fullmatch(self._text) and not self._over:
                yield
            if (begun := way.begin.match(self._text[:LONGEST])) and begun[1] in self._names:
                return (yield from self._written(way, begun))
        if key is None and form.named:
            while len(self._text) < LONGEST and _NAMED_SO_FAR.fullmatch(self._text) and not self._over:
                yield
            head = _NAMED.match(self._text[:LONGEST])
        if head is None and (key is None or not key[1]):
            return False
        object_ = _Nesting(head.end() if head else 0)
        while True:
            object_.read(self._text)
            if object_.end or self._over:
                break
            yield
        call = _parsed(self._text[: object_.end], head, bound=form.bound)
        return call is not None and call[0] in self._names and self._take(*call, object_.end)

    def _written(self, way: Writing, begun: re.Match[str]) -> Generator[None, None, bool]:
        """As `_call`, for a call in another form than a JSON object."""
        name, start, at = begun[1], begun.end(), begun.end()
        arguments: dict[str, Any] | None = None
        nesting, ends = _Nesting(start - 1, python=True) if way is PYTHONIC else None, 0
        while arguments is None:
            if nesting is not None:
                nesting.read(self._text)
                end = nesting.end - 1
            else:
                end = self._text.find(way.end, at)
            if end >= 0:  # The end's text may also be within an argument.
                at, ends = end + len(way.end), ends + 1
                arguments = way.read(self._text[start:end], self._names[name] or {})
                if arguments is None and (nesting is not None or ends == MOST_ENDS):
                    return False
            elif self._over:
                return False
            else:
                at = max(at, len(self._text) - len(way.end) + 1)
                yield
        return self._take(name, json.dumps(arguments, ensure_ascii=False), end if way.stays else at)

    def _take(self, name: str, arguments: str, end: int) -> bool:
        """Hand out a whole call that ends at `end`. Returns False if the arguments do not fit a strict function."""
        if name in self._strict and not self._strict[name](arguments):
            return False
        self._out += [Piece("call", name, self.called), Piece("arguments", arguments, self.called)]
        self.called += 1
        self._text = self._text[end:]
        return True


def _parsed(text: str, named: re.Match[str] | None, *, bound: bool) -> tuple[str, str] | None:
    """Name and arguments of a call, as JSON text; None if it is broken. named: match of the text before its arguments;
    bound: as in `Format`."""
    if text.startswith("{{"):  # Qwen2.5-Coder's template shows calls in double braces, and the model copies them.
        text = text[1:-1]
    head = named or _HEAD.match(text)
    as_written = _Nesting(head.end()).read(text) if head else ""
    try:
        value = parsed_value(text if named is None else text[named.end() :])
        if named is not None:
            value = {"name": named[1], "arguments": value}
        if bound and set(value) != {"name", "arguments"}:
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = parsed_value(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        same = bool(as_written) and parsed_value(as_written) == arguments
    except NotJSON:
        return None
    return name, as_written if same else json.dumps(arguments, ensure_ascii=False)


def parsed_value(text: str) -> Any:
    """Parse JSON as models write it. Raises NotJSON also for NaN and numbers too large for JSON."""
    value = loads(text, raw=True)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise NotJSON("a number that JSON does not hold") from None
    return value


# For clients -----------------------------------------------------------------------------------------------------


def delta(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Make the delta of a stream's chunk from pieces."""
    made: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for kind, text, number in pieces:
        if kind in ("content", "reasoning"):
            # Clients look for reasoning under either name.
            for field in ("content",) if kind == "content" else ("reasoning_content", "reasoning"):
                made[field] = made.get(field, "") + text
        elif kind == "call":
            # Templates of Mistral take ids of nine letters and digits only.
            calls.append({"index": number, "id": uuid4().hex[:9], "type": "function", "function": {"name": text}})
        else:
            calls[-1]["function"]["arguments"] = text
    return made | ({"tool_calls": calls} if calls else {})


def message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Make an assistant's message from the pieces of a whole answer."""
    made = delta(pieces)
    calls = [{key: call[key] for key in ("id", "type", "function")} for call in made.pop("tool_calls", [])]
    nothing = None if calls or made else ""
    return {"role": "assistant", "content": nothing, "refusal": None, **made} | ({"tool_calls": calls} if calls else {})
