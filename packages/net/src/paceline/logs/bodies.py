"""Read bodies of requests and responses, as logs keep them: messages, tools and answers.

    messages, tools, is_rendered = asked({"messages": [...], "system": "..."}, ignore=())
    message, usage = said('data: {"choices": [{"delta": {"content": "Hi."}}]}', ignore=())

Chat Completions, Completions and Responses of OpenAI, Messages of Anthropic, Ollama and TGI, whole or as the events of
a stream; any part of a body may be JSON in a text. A thought is part of the answer, in the marks that most models
write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from json import dumps
from typing import Any

from paceline.errors import PacelineError, kind_of
from paceline.jsonl import NotJSON, loads
from paceline.logs.tool_calls import calls

METADATA = {
    "answer_id", "author", "category", "dataset", "datasplit", "date", "error", "finish_reason", "generator", "id",
    "index", "key", "language", "logprobs", "meta", "metadata", "model", "model_id", "question_id", "source", "split",
    "tags", "time", "timestamp", "topic", "url", "user", "weights",
}  # fmt: skip
"""Keys that describe a record: their text belongs to no prompt."""
SETTINGS = {
    "chat_template_kwargs", "functions", "guided_json", "guided_regex", "logit_bias", "options", "parameters",
    "prediction", "reasoning", "response_format", "safety_identifier", "stop", "stop_sequences", "stream_options",
    "structured_outputs", "text", "thinking", "tool_choice",
}  # fmt: skip
"""Fields of a request that say how it is answered."""
OF_A_MESSAGE = {"role", "content", "tool_calls", "refusal", "tool_call_id", "name", "type", "status"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # Keys of a message with the model's text before its answer.
LABEL_WORDS, LABEL_CHARACTERS = 3, 64  # A longer text under an unknown key is an error; see `refuse_unread`.
TEXT_PARTS = ("text", "input_text", "output_text")  # Types of a content's parts that are text.
ROLES = {"developer": "system", "function": "tool", "human": "user", "gpt": "assistant", "observation": "tool"}
"""Other words for roles."""
MAX_TOKEN_ID = 1 << 31

Record = Mapping[str, Any]
Ignore = Collection[str] | None
Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}. "tool_calls": [{"function": {"name",
"arguments"}}] where it makes calls; "missing": the number of its parts that are no text, such as images."""


class ConversationError(PacelineError):
    """A record is no conversation, or a file cannot be read. The message, one line, names the place."""


# Requests and responses -------------------------------------------------------------------------------------------


def asked(body: Any, ignore: Ignore) -> tuple[list[dict[str, Any]], list[Record], bool]:
    """Read a request: its body, its messages or a text. Returns (messages, tools, whether the only message is the whole
    prompt as the model read it). Raises ConversationError for text that would be lost."""
    body = decoded(body)
    if isinstance(body, str):
        return [message("user", body)], [], False
    if isinstance(body, list):
        return messages_of(body, ignore), [], False
    if not isinstance(body, Mapping):
        raise ConversationError("no prompt in the request: neither messages nor a text as prompt")
    given = next((key for key in ("messages", "input", "prompt", "inputs") if body.get(key) is not None), None)
    value = decoded(body.get(given)) if given else None
    system = next((key for key in ("system", "instructions") if body.get(key)), None)
    refuse_unread(body, {"tools", given, system, *SETTINGS, *_ANSWERS}, ignore, "the request: ")
    if isinstance(value, str) and given in ("prompt", "inputs") and system is None:
        return [message("user", value)], [], True
    if isinstance(value, str):
        value = [message("user", value)]
    if not isinstance(value, list) or given is None:
        raise ConversationError("no prompt in the request: neither messages nor a text as prompt")
    first = [] if system is None else [{"role": "system", "content": body[system]}]
    return messages_of([*first, *value], ignore, given), tools_of(body), False


def said(body: Any, ignore: Ignore) -> tuple[dict[str, Any], int | None]:
    """Read a response: its body, its stream, a message or a text. Returns (the answer, its number of tokens or None if
    it is not counted). Raises ConversationError if there is no answer."""
    body = decoded(body)
    if isinstance(body, list) and len(body) == 1:
        body = body[0]  # TGI wraps its answer in a list.
    if isinstance(body, str):
        if (events := _events(body)) is None:
            return message("assistant", body), None
        body = _joined(events)
    if not isinstance(body, Mapping):
        raise ConversationError("no answer in the response")
    details, counted = body.get("details"), body.get("eval_count")
    usages = (body.get("usage"), details)
    names = ("completion_tokens", "output_tokens", "generated_tokens")
    every = [counted, *(usage.get(name) for usage in usages if isinstance(usage, Mapping) for name in names)]
    usage = next((count for count in every if type(count) is int), None)
    match body:
        case {"choices": [{"text": str() as text}, *_]} | {"generated_text": str() as text}:
            return message("assistant", text), usage
        case {"choices": [{"message": {"role": _} as one}, *_]} | {"message": {"role": _} as one}:
            return messages_of([one], ignore)[0], usage
        case {"output": str() as text} | {"response": str() as text}:
            return message("assistant", text), usage
        case {"output": list() as items}:
            return _of_items(items, ignore), usage
        case {"role": _}:
            own = {key: value for key, value in body.items() if key not in ("usage", "stop_reason", "stop_sequence")}
            return messages_of([own], ignore)[0], usage
    raise ConversationError("no answer in the response")


_ANSWERS = ("choices", "response", "completion", "usage", "output")  # Keys of an answer beside its request.


def _of_items(items: Sequence[Any], ignore: Ignore) -> dict[str, Any]:
    """Join the items of OpenAI's Responses to a single message."""
    thought, texts, made = "", list[Any](), list[Record]()
    for item in items:
        match item:
            case {"type": "reasoning"}:
                thought += "".join(_texts(item.get("content") or item.get("summary") or ()))
            case {"type": "function_call", "name": str() as name, "arguments": str() as arguments}:
                made.append(_call(name, arguments))
            case {"type": "message", "content": list() as parts}:
                texts += parts
    if not texts and not made:
        raise ConversationError("no answer in the response")
    one = {"role": "assistant", "content": texts, "reasoning_content": thought}
    return messages_of([one | ({"tool_calls": made} if made else {})], ignore)[0]


# Streams ----------------------------------------------------------------------------------------------------------


def _events(text: str) -> list[Record] | None:
    """The events of a stream kept as text, server-sent or a line each; None if the text is no stream."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line[5:].strip() for line in lines if line.startswith("data:")]
    if not kept and len(lines) > 1 and all(line.startswith("{") for line in lines):
        kept = lines  # Ollama has an event a line.
    found: list[Record] = []
    for line in kept:
        with suppress(NotJSON):  # [DONE] and an event that was cut off are no JSON.
            event = loads(line)
            found += [event] if isinstance(event, Mapping) else []
    return found or None


def _joined(events: Iterable[Record]) -> Record:
    """Join the events of a stream to a response."""
    content, thought, made = "", "", dict[int, dict[str, str]]()
    usage: Any = None
    for event in events:
        if event.get("type") in ("response.completed", "response.incomplete"):
            return dict(event.get("response") or {})
        if isinstance(event.get("generated_text"), str):
            return event
        usage = _usage(event) or usage
        choice: Record = next((one for one in event.get("choices") or () if not one.get("index")), {})
        delta = choice.get("delta") or event.get("delta") or event.get("message") or {}
        if not isinstance(delta, Mapping):
            continue
        own = choice.get("text") or event.get("response") or delta.get("content") or delta.get("text")
        content += own if isinstance(own, str) else ""
        thought += next((delta[key] for key in THOUGHTS if isinstance(delta.get(key), str)), "")
        begun = event.get("content_block")
        if isinstance(begun, Mapping) and begun.get("type") == "tool_use":
            made[event.get("index", 0)] = {"name": str(begun.get("name")), "arguments": ""}
        if isinstance(delta.get("partial_json"), str) and event.get("index") in made:
            made[event["index"]]["arguments"] += delta["partial_json"]
        for call in delta.get("tool_calls") or ():
            one, function = made.setdefault(call.get("index", 0), {"name": "", "arguments": ""}), call.get("function")
            for key in ("name", "arguments"):
                one[key] += (function or {}).get(key) or ""
    if not content and not thought and not made:
        raise ConversationError("the stream that was kept has no answer in it")
    answer = {"role": "assistant", "content": content, "reasoning_content": thought}
    tools = [_call(**one) for _, one in sorted(made.items())]
    return {"message": answer | ({"tool_calls": tools} if tools else {}), "usage": usage}


def _usage(event: Record) -> Any:
    """The counts of tokens in an event, Anthropic's first event included."""
    if type(event.get("eval_count")) is int:
        return {"completion_tokens": event["eval_count"]}
    return event.get("usage")


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# Messages and values ----------------------------------------------------------------------------------------------


def message(role: str, content: str) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content}


def messages_of(
    value: Any, ignore: Ignore, name: str = "messages", role: str = "role", content: str = "content"
) -> list[dict[str, Any]]:
    """The messages in the list under the key `name`, with their role and content under these keys."""
    with suppress(AttributeError, KeyError, TypeError):  # A part of a message is missing, or of another kind.
        if value and isinstance(value, list):
            return [one for each in value for one in _read_message(each, ignore, role, content)]
    raise ConversationError(f'"{name}" must be a list of {{"{role}": "user", "{content}": "text"}}')


def _read_message(raw: Any, ignore: Ignore, role: str, content: str) -> list[dict[str, Any]]:
    """The message in an object, after the results of its tools. Raises KeyError, TypeError or AttributeError if there
    is none."""
    refuse_unread(raw, OF_A_MESSAGE | {role, content, *THOUGHTS}, ignore, "a message: ")
    silent = raw.get("tool_calls") or raw.get("refusal")
    own = raw.get(content) or raw.get("refusal") or "" if silent else raw[content]
    parts = own if isinstance(own, list) else [{"type": "text", "text": own}]
    texts = [part["text"] for part in parts if part["type"] in TEXT_PARTS]
    thoughts = [raw[key] for key in THOUGHTS if isinstance(raw.get(key), str) and key not in (ignore or ())][:1]
    thoughts += [part["thinking"] for part in parts if part["type"] == "thinking"]
    used = [part for part in parts if part["type"] == "tool_use"]
    given = [part for part in parts if part["type"] == "tool_result"]
    missing = len(parts) - len(texts) - len(used) - len(given) - sum(part["type"] == "thinking" for part in parts)
    made = [_call(part["name"], dumps(part["input"], ensure_ascii=False)) for part in used]
    made = made or (calls(raw) if raw.get("tool_calls") else [])
    results = [message("tool", "".join(_texts(part.get("content") or ""))) for part in given]
    text = "".join(texts)
    if thought := "".join(thoughts).strip():
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    when = {} if (at := seconds_of(raw.get("timestamp"))) is None else {"at": at}
    results = [result | when for result in results]
    if results and not text and not missing:
        return results
    one = message(ROLES.get(raw[role], raw[role] + ""), text) | when
    one |= {"missing": missing} if missing else {}
    return [*results, one | ({"tool_calls": made} if made else {})]


def seconds_of(time: Any) -> float | None:
    """Seconds since 1970 of a time in ISO 8601, or of a number of seconds or milliseconds; None for anything else."""
    with suppress(ValueError, OverflowError, OSError):  # No such day, or no number of a processor.
        if isinstance(time, str):
            return datetime.fromisoformat(time).timestamp()
        if isinstance(time, int | float) and not isinstance(time, bool) and time > 0:
            return time / 1000 if time > 1e11 else float(time)
    return None


def _texts(content: Any) -> list[str]:
    """The texts of a content, which may be a text or a list of parts."""
    if isinstance(content, str):
        return [content]
    return [str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part]


def tools_of(body: Record) -> list[Record]:
    """The functions that a request offers, in the form of OpenAI's chats."""
    given = tools if isinstance(tools := body.get("tools"), list) else ()
    functions = []
    for tool in given:
        if not isinstance(tool, Mapping):
            continue
        flat = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
        if "input_schema" in tool:  # Anthropic has this key.
            flat["parameters"] = tool["input_schema"]
        functions.append(tool.get("function") or (flat if "name" in flat else None))
    return [{"type": "function", "function": one} for one in functions if isinstance(one, Mapping)]


def decoded(value: Any) -> Any:
    """The value of JSON in a text; the value itself if it is no JSON."""
    try:
        return loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value
    except NotJSON:
        return value


def text_of(record: Record, key: str) -> str:
    """The text under a key. Raises ConversationError if it is no text."""
    if not isinstance(record[key], str):
        raise ConversationError(f'"{key}" must be a text, not {kind_of(record[key])}')
    return str(record[key])


def are_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(id) is int and 0 <= id < MAX_TOKEN_ID for id in value)


def ids_of(record: Record, key: str) -> list[int]:
    """The token ids under a key. Raises ConversationError if they are no token ids."""
    value: Any = record.get(key)
    if not are_ids(value):
        raise ConversationError(f'"{key}" must be a list of token ids')
    return list(value)


def refuse_unread(record: Record, read: Collection[str | None], ignore: Ignore, place: str = "") -> None:
    """Raise ConversationError for text longer than a label under a key outside `read`, METADATA and `ignore`."""
    if ignore is None:
        return
    for key, value in record.items():
        if key not in read and key not in METADATA and key not in ignore and _holds_text(value):
            raise ConversationError(
                f'{place}the text under "{key}" would not be read; make it part of the prompt or of a message, put '
                f'it under "metadata" or take it out, or give replay and tune --ignore {key}'
            )


def _holds_text(value: object) -> bool:
    if isinstance(value, str):
        return len(value) > LABEL_CHARACTERS or len(value.split()) > LABEL_WORDS
    if isinstance(value, (dict, list)):
        return any(map(_holds_text, value.values() if isinstance(value, dict) else value))
    return False
