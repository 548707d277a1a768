"""The fields of requests: those of OpenAI's chat and text completions, and those that local servers add.

A field that is not here is refused by name. `sampling` turns a request into the engine's parameters."""

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SkipValidation,
    ValidationError,
    model_validator,
)  # fmt: skip

from paceline.core.params import SamplingParams, token_id
from paceline.core.rules import SEEDS
from paceline.errors import PacelineError, shortened
from paceline.serve.said import once
from paceline.serve.settings import Refused

IMAGE = "[an image, which this model cannot read]"
"""What stands for an image in a tool's output."""
IDLE = {
    "cache_prompt", "context_management", "include", "include_obfuscation", "modalities", "service_tier", "summary",
    "truncation",
}  # fmt: skip
"""Fields with values known to ask for nothing. With --lenient their other values are ignored too."""
CARRIED = {"conversation", "previous_response_id", "prompt"}
"""Fields that stand for a part of the conversation: without it, the answer would be one to something else."""
Fields = TypeVar("Fields", bound=BaseModel)


def validated(kind: type[Fields], body: dict[str, Any], lenient: bool = False) -> Fields:
    """Check the fields of a JSON object. Raises Refused with the first error. lenient: unknown fields, and fields that
    ask for a missing feature, are left out and named once."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    needless = [place for one in errors if (place := _needless(one))]
    if lenient and len(needless) == len(errors):
        return validated(kind, _without(body, needless), lenient)
    where = shortened(" ".join(".".join(map(str, first["loc"])).split()), 200) or "the body"
    if first["type"] == "extra_forbidden":
        raise Refused(f"{where} is not a field that this server supports; leave it out", where)
    what = " ".join(first["msg"].removeprefix("Value error, ").split())  # The message may repeat the client's text.
    raise Refused(f"{where}: {shortened(what, 400)}", where)


def _needless(error: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The place of the field that an error is about, if an answer without it is the same; () if not."""
    place = error["loc"]
    if error["type"] == "extra_forbidden":
        return () if place[0] in CARRIED else place
    return next((place[: i + 1] for i, step in enumerate(place) if step in IDLE), ())


def _without(body: dict[str, Any], places: list[tuple[int | str, ...]]) -> dict[str, Any]:
    """A copy of a body without the values at `places`. A step of a place is a key, an index, or the name of a union's
    member, which the body does not have."""
    made = deepcopy(body)
    for place in places:
        at: Any = made
        for step in place[:-1]:
            known = step in at if isinstance(at, dict) else isinstance(step, int) and isinstance(at, list)
            at = at[step] if known else at
        if at.pop(place[-1], None) is not None:  # Several errors may name the same field.
            once(f"{shortened('.'.join(map(str, place)))} is not a field that this server supports, and is ignored")
    return made


class Strict(BaseModel):
    """Refuses fields that it does not know, and texts for numbers. null stands for a field that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def text_of(content: Any) -> str:
    """One text of a content that is a text, a list of text parts or null. Raises ValueError for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("content must be a text or a list of text parts")
    for part in content:
        if not isinstance(part, dict):
            raise ValueError('a content part must be an object such as {"type": "text", "text": "Hi"}')
        if part.get("type") != "text":
            raise ValueError(f"content of type {str(part.get('type'))[:80]} is not supported; give text")
        if not isinstance(part.get("text"), str):
            raise ValueError("a content part of type text must have a text")
    return "".join(part["text"] for part in content)


def _a_prompt(given: Any) -> Any:
    """Check a prompt. Stops at the first wrong item; a union of list types would report all."""

    def all_are(kind: type, items: Any) -> bool:
        return isinstance(items, list) and all(type(item) is kind for item in items)

    if isinstance(given, str) or all_are(str, given) or all_are(int, given):
        return given
    if isinstance(given, list) and all(all_are(int, one) for one in given):
        return given
    raise ValueError("give a text, a list of texts, token ids, or a list of lists of token ids")


def seed_of(given: Any) -> Any:
    """Read a seed: -1 means none, as in vLLM and llama.cpp. OpenAI's API has other negative seeds, which stand for the
    seed with the same 64 bits."""
    return None if given == -1 and type(given) is int else given


Seed = Annotated[Annotated[int, Field(ge=-(SEEDS // 2), lt=SEEDS)] | None, pydantic.BeforeValidator(seed_of)]
TokenId = Annotated[int, pydantic.BeforeValidator(token_id)]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Strict):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Strict):
    type: Literal["content"]
    content: Annotated[SkipValidation[str | list[dict[str, Any]]], AfterValidator(text_of)]


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None  # Prefixes are reused without a mark.


class FunctionName(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"] = "function"
    function: FunctionName


class Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: list[ToolChoice] = Field(min_length=1)


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Reasoning(Strict):
    """How much an answer should think, as in OpenAI's Responses and in routers."""

    effort: str | None = None
    enabled: bool | None = None
    summary: Literal["auto", "none"] | None = None


class Thinking(Strict):
    """Whether an answer should think, as in Anthropic's API and others. The budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


PARAMETERS = (
    "temperature", "top_p", "min_p", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "draft", "ignore_eos", "min_tokens",
)  # fmt: skip
"""Fields passed to the engine unchanged."""


class Common(Strict):
    """Fields of both chats and texts."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = Field(1, ge=1)
    seed: Seed = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    on_length: Literal["cut", "close"] = "cut"
    prediction: Prediction | None = None
    draft: str | None = None
    return_token_ids: bool = False
    cache_salt: str | None = Field(None, min_length=1)
    # The next four name things for the caller and change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    # These may only ask for what the server does anyway.
    service_tier: Literal["auto", "default"] | None = None
    cache_prompt: Literal[True] | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="after")
    def refuse_what_cannot_be(self) -> Self:
        """Raise PacelineError if another field makes the server ignore a field."""
        for is_ignored, why in self.ignored():
            if is_ignored:
                raise PacelineError(why)
        return self

    def ignored(self) -> list[tuple[bool, str]]:
        """Pairs for every rule: (whether a field would be ignored, the message for that case)."""
        form = self.response_format
        return [
            (self.stream_options is not None and not self.stream, "stream_options is for streams; set stream to true"),
            (bool(self.store), "store is true, and this server keeps no answers; leave it out"),
            (self.on_length == "close" and not self.is_constrained, "on_length close is for answers that must be JSON"),
            (self.ignore_eos and self.is_constrained, "ignore_eos cannot go on past the end of JSON; leave it out"),
            (
                form is not None and form.type != "json_schema" and form.json_schema is not None,
                "response_format has a json_schema; set its type to json_schema",
            ),
        ]

    @property
    def is_constrained(self) -> bool:
        """Whether the answer has to be JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    def sampling(self, most: int, defaults: Mapping[str, float] = MappingProxyType({}), **more: Any) -> SamplingParams:
        """The engine's parameters. Raises PacelineError for values that make no sense.

        most      most new tokens that still fit.
        defaults  parameters for fields that the request leaves out."""
        own = {name: getattr(self, name) for name in PARAMETERS} | {
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "seed": None if self.seed is None else self.seed % SEEDS,
            "stop": [*filter(None, [self.stop])] if isinstance(self.stop, str) else self.stop,
            "max_tokens": self.most_tokens if self.most_tokens is not None else most,
        }
        if self.min_tokens > max(own["max_tokens"], 0):
            raise Refused(f"min_tokens is {self.min_tokens}, and max_tokens {own['max_tokens']}", "min_tokens")
        if self.min_tokens and more.get("grammar") is not None:
            raise Refused("min_tokens does not go with an answer whose form is given; leave it out", "min_tokens")
        given = {name: value for name, value in own.items() if value is not None}
        return SamplingParams(**{"temperature": 1.0, **defaults, **given}, **more)

    @property
    def most_tokens(self) -> int | None:
        """The request's limit of new tokens, None if it has none."""
        return self.max_tokens


class Conversation(Strict):
    """The fields that make a chat's prompt.

    continue_final_message  whether the answer continues the last message, which is the assistant's."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    verbosity: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def refuse_another_turn(self) -> Self:
        """Raise Refused if continue_final_message goes with a last message of another role, or with a new turn."""
        last = self.messages[-1].get("role") if self.messages else None
        if self.continue_final_message and (last != "assistant" or self.add_generation_prompt):
            needs = "an assistant's last message, and add_generation_prompt false"
            raise Refused(f"continue_final_message needs {needs}", "continue_final_message")
        return self

    @property
    def effort(self) -> tuple[str, str | None]:
        """(the field's name, how much an answer should think); None: the template decides."""
        if self.reasoning_effort is None and self.reasoning is not None and self.reasoning.enabled is not False:
            return "reasoning", self.reasoning.effort
        return "reasoning_effort", self.reasoning_effort

    @property
    def thinks(self) -> tuple[str, bool | None]:
        """(the field's name, whether an answer should think); None: the template decides."""
        if self.enable_thinking is None and self.thinking is not None:
            return "thinking", {"enabled": True, "disabled": False, "adaptive": None}[self.thinking.type]
        if self.enable_thinking is None and self.reasoning is not None and self.reasoning.enabled is not None:
            return "reasoning", self.reasoning.enabled
        return "enable_thinking", self.enable_thinking

    @property
    def turns(self) -> dict[str, bool]:
        """How `Tokenizer.encode_chat` ends the prompt."""
        if self.continue_final_message:
            return {"continue_final_message": True, "add_generation_prompt": False}
        return {} if self.add_generation_prompt is None else {"add_generation_prompt": self.add_generation_prompt}


class ChatRequest(Conversation, Common):
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    def ignored(self) -> list[tuple[bool, str]]:
        formed, most = super().is_constrained, (self.max_tokens, self.max_completion_tokens)
        return [
            *super().ignored(),
            (bool(self.top_logprobs) and not self.logprobs, "top_logprobs needs logprobs; set logprobs to true"),
            (
                formed and self.must_call,
                "response_format cannot be kept to where tool_choice asks for a call; leave one of them out",
            ),
            (
                None not in most and most[0] != most[1],
                f"max_tokens is {most[0]} and max_completion_tokens {most[1]}; give one of them",
            ),
        ]

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, ToolChoice)

    @property
    def is_constrained(self) -> bool:
        return super().is_constrained or self.must_call

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class TextRequest(Common):
    prompt: Annotated[SkipValidation[str | list[int] | list[str] | list[list[int]]], AfterValidator(_a_prompt)]
    suffix: str | None = None
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)

    @property
    def most_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # This is OpenAI's default.


class TokenizeRequest(Conversation):
    """A text, or a chat as it would be asked."""

    messages: list[dict[str, Any]] = Field([], min_length=1)
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def refuse_what_cannot_be(self) -> Self:
        """Raise PacelineError unless there is either a prompt or messages."""
        if (self.prompt is None) == (not self.messages):
            raise PacelineError("give either prompt or messages")
        if self.messages and self.add_special_tokens is not None:
            raise PacelineError("add_special_tokens is for a prompt; the chat template decides for messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
