"""Work a request out once: its prompts in token ids, and for each answer its parameters, grammar and reader. Knows no
HTTP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.core.rules import SEEDS
from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError, shortened
from paceline.logs.tool_calls import prepared
from paceline.serve import reading
from paceline.serve import tools as tool
from paceline.serve.ahead import same_beginning
from paceline.serve.fields import ChatRequest, Common, Conversation, TextRequest, Tool, text_of
from paceline.serve.harmony import HarmonyReader, with_thinking
from paceline.serve.infill import filling
from paceline.serve.reading import Reader
from paceline.serve.said import shown_drafts
from paceline.serve.settings import Refused, Settings
from paceline.serve.structure import Grammars
from paceline.serve.worker import Worker


@dataclass(frozen=True)
class Prompted:
    """A prompt and the parameters of each of its answers.

    reader    makes a reader for each answer; None: an answer is plain text.
    text      the prompt's text, if the request wants it back.
    branches  lengths of the prompt, as in SamplingParams."""

    prompt: list[int]
    params: list[SamplingParams]
    reader: Callable[[], Reader] | None = None
    text: str | None = None
    branches: Sequence[int] = ()


class Preparer:
    """Works requests out for a worker's model. Raises Refused, or another PacelineError, for what it cannot answer."""

    def __init__(self, worker: Worker, settings: Settings):
        self.worker, self.settings, self.engine = worker, settings, worker.engine
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        self.tokenizer.name = settings.model  # Errors name the tokenizer to strangers, who must not read a path.
        self.tokenizer.reads_marks = settings.parse_marks
        target = self.engine.target
        self.defaults = settings.defaults(target.sampling)
        self.grammars = Grammars(
            self.tokenizer, target.vocab_size, target.eos_token_ids, white_space=settings.json_whitespace
        )
        self.formats = reading.tool_formats(settings.tool_parser)
        self.marks = reading.reasoning_marks(settings.reasoning_parser, self.tokenizer.chat_template)
        self.tokenizer.show(reading.all_marks(self.formats, self.marks))
        self.drafts = shown_drafts(settings.drafts)

    def check_model(self, model: str | None) -> None:
        """Raise Refused if the server has no such model."""
        names = (self.settings.model, *self.settings.also)
        if model is not None and model not in names and "*" not in names:
            what = f"model is {shortened(repr(model))}; this server has {', '.join(map(repr, names))}"
            raise Refused(what, "model", 404, "model_not_found")

    def check(self, request: Common) -> None:
        """Raise Refused if the server has no such model or drafter. Replaces the drafter's name by its whole spec."""
        self.check_model(request.model)
        if request.draft is None:
            return
        request.draft = self.drafts.get(request.draft, request.draft)
        if request.draft not in self.settings.drafts:
            choice = ", ".join(self.drafts)
            raise Refused(f"draft is {shortened(repr(request.draft))}; requests may choose {choice}", "draft")

    def tools_of(self, request: Conversation) -> list[Tool]:
        """The functions that an answer may call. Raises PacelineError if a strict schema cannot be enforced."""
        tools = tool.chosen(request)
        for one in tools:
            schema = tool.parameters(one)
            if one.function.strict:
                self.grammars.check(schema)
        return tools

    def prompt_of(
        self, request: Conversation, tools: Sequence[Tool], whole: bool = True, **more: Any
    ) -> list[int]:  # fmt: skip
        """Token ids of a conversation and its tools.
        whole: whether it must fit the context; more: variables for the template."""
        options = dict(request.chat_template_kwargs or {})
        for name in tool.unread_variables(self.tokenizer, options, tools=bool(tools), refuse=not self.settings.lenient):
            del options[name]
        options |= tool.thinking(
            request, self.tokenizer.chat_template, self.marks is not None, refuse=not self.settings.lenient
        )
        given = [one.model_dump(exclude_none=True, exclude={"cache_control"}) for one in tools]
        messages, inputs = prepared(_plain(request.messages), given, "tools" in self.tokenizer.chat_template)
        if self.marks == reading.HARMONY:
            messages = [with_thinking(message) for message in messages]
        if whole:
            self.tokenizer.refuse_long(messages, self.engine.target.max_context)  # Megabytes would block everybody.
        return self.tokenizer.encode_chat(messages, **(options | inputs | request.turns | more))

    def branches(self, request: Conversation, tools: Sequence[Tool], prompt: list[int]) -> list[int]:
        """Lengths of a prompt at which later prompts may differ: before the user's first words, and before the words
        that invite an answer. Only recurrent models need them."""
        if not self.engine.target.recurrent or not request.turns.get("add_generation_prompt", True):
            return []
        count = next((i for i, one in enumerate(request.messages) if one.get("role") == "user"), 0)
        other = {"role": "user", "content": "?"}
        begins = request.model_copy(update={"messages": [*request.messages[:count], other]})
        try:
            others = self.prompt_of(begins, tools), self.prompt_of(request, tools, add_generation_prompt=False)
        except PacelineError:  # Some templates refuse to end there.
            return []
        return [len(same_beginning(prompt, one)) for one in others]

    def reasoning_of(self, request: ChatRequest, prompt: list[int]) -> tuple[tuple[str, str] | None, bool]:
        """Returns (marks of an answer's reasoning, or None if there can be none; whether the prompt has begun it)."""
        if self.marks is None:
            return None, False
        if request.continue_final_message and (said := text_of(request.messages[-1].get("content"))):
            inside = self.marks[1] not in said and said.lstrip().startswith(self.marks[0])
            return (self.marks if inside else None), inside
        end = str(self.tokenizer.inner.decode(prompt[-16:])).rstrip()
        return (None if end.endswith(self.marks[1]) else self.marks), end.endswith(self.marks[0])

    def reader(
        self, request: ChatRequest, tools: Sequence[Tool], marks: tuple[str, str] | None, inside: bool
    ) -> Reader:
        """A reader of one answer to a chat."""
        formats = self.formats if tools and not request.must_call else ()
        if tools and request.is_constrained:
            formats = (*formats, reading.BARE)
        names = {one.function.name: one.function.parameters for one in tools}
        most = 1 if request.parallel_tool_calls is False else None
        if marks == reading.HARMONY:
            formats = formats if request.is_constrained else ()
            return HarmonyReader(formats, names if self.formats else (), most=most, strict=self.strict(tools))
        return Reader(formats, names, marks, inside=inside, most=most, strict=self.strict(tools))

    def strict(self, tools: Sequence[Tool]) -> reading.ArgumentChecks:
        """For each strict function, by name, a check whether arguments fit its schema."""
        strict = [(one.function.name, tool.parameters(one)) for one in tools if one.function.strict]
        return {name: partial(self.grammars.fits, schema) for name, schema in strict}

    def most_tokens(self, prompt: Sequence[int]) -> int:
        """The number of tokens that fit into the context after a prompt."""
        return max(self.engine.longest - len(prompt), 1)

    def params(self, request: Common, prompt: list[int], logprobs: int | None, grammar: Any) -> SamplingParams:
        """The engine's parameters, with the request's prediction."""
        more: dict[str, Any] = {"logprobs": logprobs, "grammar": grammar}
        if request.prediction is not None:
            expected = str(request.prediction.content)
            self.tokenizer.refuse_long(expected, self.engine.target.max_context)
            more["prediction"] = tuple(self.tokenizer.encode_text(expected))
            if (size := len(more["prediction"])) >= self.engine.target.max_context:
                what = f"prediction has {size} tokens, and this model's context holds {self.engine.target.max_context}"
                raise Refused(f"{what}; shorten it", "prediction", code="context_length_exceeded")
        return request.sampling(self.most_tokens(prompt), self.defaults, **more)

    def grammar(
        self, request: Common, most: int, tools: Sequence[Tool] = (), marks: tuple[str, str] | None = None,
        inside: bool = False,
    ) -> Any:  # fmt: skip
        """A new grammar for an answer of at most `most` tokens, or None for any text. A chat's grammar begins after its
        reasoning."""
        grammar, schema = self._grammar(request, tools)
        if request.on_length == "close":
            grammar = self.grammars.closing(grammar, schema, min(request.most_tokens or most, most))
        return self.grammars.after_reasoning(grammar, marks, inside) if grammar and marks else grammar

    def _grammar(self, request: Common, tools: Sequence[Tool]) -> tuple[Any, Any]:
        """A grammar and its schema, or schemas; None for any text."""
        if isinstance(request, ChatRequest) and request.must_call:
            return self.grammars.json_schema(schema := tool.schema(tools)), schema
        wanted = request.response_format
        if wanted is None or wanted.type == "text":
            return None, None
        if wanted.type == "json_object":
            return self.grammars.json_object(), {}
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise PacelineError("response_format is json_schema, and json_schema.schema is missing")
        if tools:
            each = tool.schema(tools), wanted.json_schema.schema_
            return self.grammars.either(*each), each
        return self.grammars.json_schema(wanted.json_schema.schema_), wanted.json_schema.schema_

    def prompted(self, request: Common) -> list[Prompted]:
        """Work out every prompt of a request. Takes long for large prompts, schemas and templates."""
        self.check(request)
        if isinstance(request, ChatRequest):
            self.check_count(request.n)
            return [self._chat(request)]
        assert isinstance(request, TextRequest)
        request = filling(self.tokenizer, request, self.engine.longest)
        given: Any = request.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise PacelineError("prompt is empty; give a text, token ids, or a list of them")
        self.check_count(len(given) * request.n)
        return [self._text(request, prompt) for prompt in given]

    def _chat(self, request: ChatRequest) -> Prompted:
        tools = self.tools_of(request)
        prompt = self.prompt_of(request, tools)
        marks, inside = self.reasoning_of(request, prompt)
        grammar = partial(self.grammar, request, self.most_tokens(prompt), tools, marks, inside)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        answers = self._answers(request, prompt, logprobs, grammar)
        reader = partial(self.reader, request, tools, marks, inside)
        return Prompted(prompt, answers, reader, branches=self.branches(request, tools, prompt))

    def _text(self, request: TextRequest, prompt: str | list[int]) -> Prompted:
        if isinstance(prompt, str) and not request.add_special_tokens:
            self.tokenizer.refuse_long(prompt, self.engine.target.max_context)
            prompt = self.tokenizer.encode_text(prompt)
        ids = self.engine.encode(prompt).tolist()
        text = self.tokenizer.decode(ids) if request.echo else None
        grammar = partial(self.grammar, request, self.most_tokens(ids))
        return Prompted(ids, self._answers(request, ids, request.logprobs, grammar), text=text)

    def _answers(
        self, request: Common, prompt: list[int], logprobs: int | None, grammar: Callable[[], Any]
    ) -> list[SamplingParams]:
        """Parameters of each of the n answers.
        A prompt to be scored alone needs one answer, a prompt only echoed none."""
        if only_echo(request):
            if logprobs is None:
                return []
            request = request.model_copy(update={"max_tokens": 1, "n": 1})
        first = self.params(request, prompt, logprobs, grammar())
        if isinstance(request, TextRequest) and request.echo:
            first = replace(first, prompt_logprobs=logprobs)
        self.engine.check(prompt, first)
        seeds = [None if first.seed is None else (first.seed + i) % SEEDS for i in range(1, request.n)]
        return [first, *(replace(first, grammar=grammar(), seed=seed) for seed in seeds)]

    def check_count(self, answers: int) -> None:
        """Raise Refused if there are more answers than can ever wait."""
        if answers > (most := self.worker.most_waiting + self.engine.max_batch):
            raise Refused(f"{answers:,} answers at once are asked for, and this server takes at most {most:,}")


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the content of each as one text. Raises Refused for other content."""
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise Refused(f"messages.{i}: role is missing or no text", "messages")
        try:
            given = {name: value for name, value in message.items() if value is not None}
            if "reasoning" in given:  # Newer clients use this name.
                given.setdefault("reasoning_content", given.pop("reasoning"))
            plain.append({**given, "content": text_of(message.get("content"))})
        except ValueError as error:
            raise Refused(f"messages.{i}: {error}", "messages") from None
    return plain


def only_echo(request: Common) -> bool:
    """Whether a request wants its prompt back and no answer."""
    return isinstance(request, TextRequest) and request.echo and request.max_tokens == 0 and not request.stream
