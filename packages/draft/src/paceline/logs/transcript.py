"""From recorded text to the tokens a model would have read and written. Knows tokenizers and templates, no drafter.

The prompt of a turn is the whole conversation before it, through the chat template, as our server builds it: marks such
as <|im_end|> in what people say are text, and messages that the template refuses are joined or turned. The answer is
tokenised in place: the tokens of prompt and answer together, without the prompt's, and the end token."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from paceline.core.tree import IntArray
from paceline.errors import ModelError, PromptError
from paceline.formats.plain_tokenizer import compiled
from paceline.formats.tokenizer import SentencePiece, Tokenizer
from paceline.formats.tokenizer_files import load_tokenizer
from paceline.logs.bodies import MAX_TOKEN_ID, ConversationError, Message
from paceline.logs.chat_templates import source_of, template_names
from paceline.logs.conversations import Reading
from paceline.logs.formats import Conversation
from paceline.logs.tool_calls import as_text, prepared

REFUSALS = (PromptError, jinja2.TemplateError, TypeError, KeyError)
"""What a template raises for messages that it does not take."""

Render = Callable[..., str]
"""(messages, whether up to where the assistant speaks, tools=...) to text, special tokens spelled out."""


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer. prompt int64 [p] is everything before it, answer int64 [a] ends with the end token."""

    prompt: IntArray
    answer: IntArray


@dataclass(frozen=True)
class Transcript:
    """A conversation in tokens: its answers, in order."""

    category: str
    turns: Sequence[RecordedAnswer]

    @property
    def new_tokens(self) -> int:
        """Tokens of its answers."""
        return sum(len(turn.answer) for turn in self.turns)


def open_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder, or of a tokenizer.json or a SentencePiece file.

    Raises ModelError if there is none, or if it names no end token."""
    file = Path(path).expanduser()
    tokenizer = load_tokenizer(file.parent if file.name == "tokenizer.json" and file.is_file() else path)
    if tokenizer.eos_token_id is None:
        mend = "put the eos_token into the tokenizer_config.json next to it"
        raise ModelError(f"the tokenizer {path} names no end token, with which answers end; {mend}")
    return tokenizer


class Transcriber:
    """Writes exchanges in tokens.

    template  one of `template_names()`, a Jinja file, or None: the tokenizer's own, which only messages need.
    marks     other marks than special tokens and those of the tokenizer's template, such as a server's parsers'.

    Raises ModelError if messages come and the tokenizer has no template, ConversationError for a broken template."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, marks: Iterable[str] = ()):
        self.tokenizer = tokenizer
        tokenizer.show(marks)
        assert tokenizer.eos_token_id is not None
        self._end = tokenizer.eos_token_id
        source = tokenizer.chat_template if template is None else source_of(template)
        self._given = None if template is None else _written(tokenizer, template, source)
        self._reads_tools = "tools" in source
        self._special: dict[str, int] = {}
        if isinstance(tokenizer.inner, SentencePiece):
            self._special = {str(token): id for id, token in tokenizer.inner.added_tokens_decoder.items()}

    @cached_property
    def _render(self) -> Render:
        return self._given or _own(self.tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Tokens of a conversation up to the assistant's turn. Raises PromptError if the template refuses it."""
        try:
            return self._encode(self._shown(messages, tools, True))
        except REFUSALS as error:
            raise PromptError(_refusal(error)) from None

    def conversations(self, exchanges: Iterable[Conversation], reading: Reading) -> Iterator[Transcript]:
        """Conversations in tokens. `reading` counts those that the template refuses, which are left out, and tokens
        of the answers that the log counts too."""
        for exchange in exchanges:
            try:
                transcript = self.conversation(exchange)
            except ConversationError as error:
                reading.skip(error)
                continue
            if isinstance(exchange.usage, int) and 0 < exchange.usage < MAX_TOKEN_ID and transcript.turns:
                reading.logged += exchange.usage
                reading.counted += len(transcript.turns[-1].answer)
            yield transcript

    def conversation(self, exchange: Conversation) -> Transcript:
        """A conversation in tokens; without turns if nothing could be drafted.
        Raises ConversationError if it is refused."""
        if exchange.tokens is not None:
            prompt, answer = exchange.tokens[0] or (), exchange.tokens[1]
            text, begin = np.array([*prompt, *answer], np.int64), max(len(prompt), 1)  # A draft follows a token.
            turns = [RecordedAnswer(text[:begin], text[begin:])] if len(text) > begin else []
            return Transcript(exchange.category, turns)
        try:
            return Transcript(exchange.category, [self._turn(exchange, at) for at in exchange.answers])
        except REFUSALS as error:
            raise ConversationError(f"{exchange.where}: {_refusal(error)}") from None

    def _turn(self, one: Conversation, at: int) -> RecordedAnswer:
        if one.is_rendered:
            before, reply = one.messages[0]["content"], one.messages[at]["content"]
        else:
            before = self._shown(one.messages[:at], one.tools, True)
            reply = self._reply(one, at, before)
        prompt, whole = self._encode(before), self._encode(before + reply)
        # Where prompt and answer meet in one token, the model has still read the prompt's own tokens.
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._encode(reply)
        return RecordedAnswer(np.array(prompt, np.int64), np.array([*answer, self._end], np.int64))

    def _shown(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], ask: bool) -> str:
        """The text of messages and tools as `paceline serve` shows them to the model."""
        given, inputs = self.tokenizer.hidden(*prepared(messages, tools, self._reads_tools))
        return self._render(given, ask, **inputs)

    def _reply(self, one: Conversation, at: int, before: str) -> str:
        """What the model wrote after the text `before`. Calls are in the template's own words, if it has any."""
        (lead, tail), message = self._around, one.messages[at]
        if message.get("tool_calls") and self._reads_tools:
            whole = self._shown(one.messages[: at + 1], one.tools, False)
            if whole.startswith(before):
                return whole[len(before) :].removesuffix(tail)
        ((said,), _) = self.tokenizer.hidden([as_text(message)], {})
        return lead + str(said["content"])

    @cached_property
    def _around(self) -> tuple[str, str]:
        """What templates put around an answer: the space before it, which a model writes itself, and what ends it."""
        asked, mark = {"role": "user", "content": "?"}, "(an answer)"
        try:
            before = self._render([asked], True)
            whole = self._render([asked, {"role": "assistant", "content": mark}], False)
        except REFUSALS:
            return "", ""
        lead, _, tail = whole[len(before) :].partition(mark)
        return (lead, tail) if whole.startswith(before) and not lead.strip() else ("", "")

    def _encode(self, text: str) -> list[int]:
        """Tokens of rendered text; a SentencePiece model does not know its special tokens when it sees them."""
        if not self._special:
            return self.tokenizer.encode_hidden(text)
        spelled = "|".join(map(re.escape, self._special))
        ids: list[int] = []
        for piece in re.split(f"({spelled})", text):
            ids += [self._special[piece]] if piece in self._special else self.tokenizer.encode_text(piece)
        return ids


def _own(tokenizer: Tokenizer) -> Render:
    if not tokenizer.has_chat_template:
        choice = f"--template {', '.join(template_names())} or a Jinja file"
        raise ModelError(f"{tokenizer.name} has no chat template; say which one the prompts went through: {choice}")

    def render(messages: Sequence[Message], ask: bool, **inputs: Any) -> str:
        return tokenizer.render_chat(messages, add_generation_prompt=ask, **inputs)

    return render


def _written(tokenizer: Tokenizer, name: str, source: str) -> Render:
    try:
        template = compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConversationError(f"the template {name} is broken: {error} (line {error.lineno})") from None
    names = {"bos_token": _begin(tokenizer), "eos_token": tokenizer.inner.eos_token}

    def render(messages: Sequence[Message], ask: bool, **inputs: Any) -> str:
        return template.render(messages=messages, add_generation_prompt=ask, **names, **inputs)

    return render


def _refusal(error: Exception) -> str:
    return str(error) if isinstance(error, PromptError) else f"the chat template refuses these messages: {error}"


def _begin(tokenizer: Tokenizer) -> str:
    """The token that the model wants in front of a text, spelled out; "" if it wants none."""
    ids = tokenizer.encode("")
    begin: Any = tokenizer.inner.added_tokens_decoder.get(ids[0]) if ids else None
    return str(begin) if begin is not None and ids[0] != tokenizer.eos_token_id else ""
