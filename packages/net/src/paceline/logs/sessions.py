"""Read sessions that coding agents keep on the disk, as conversations. A file, or a folder, has one or more sessions.

    for agent, path in found(Path.home()): ...
    for conversation in read_sessions(path): ...

Codex keeps a line for each item of OpenAI's Responses, Claude Code one for each block of Anthropic's Messages, aider a
Markdown file, opencode a database (before 2026 a folder of JSON files), Cline a list of Anthropic's messages. None
keeps the system prompt in full or the tools, so prompts are shorter here than the model's were."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

from paceline.jsonl import NotJSON, loads
from paceline.logs.bodies import ConversationError, Message, Record, messages_of
from paceline.textfiles import opened

Messages = list[dict[str, Any]]


class Agent(NamedTuple):
    """An agent's way to keep sessions.

    places  patterns of its files below the home folder.
    fits    returns whether a file, or a folder, is the agent's.
    read    returns the sessions in it: messages in Anthropic's or OpenAI's form."""

    name: str
    places: Sequence[str]
    fits: Callable[[Path], bool]
    read: Callable[[Path], Iterable[Messages]]


def found(home: Path) -> Iterator[tuple[str, Path]]:
    """The agents' files below a home folder: (agent's name, path)."""
    for agent in AGENTS:
        for place in agent.places:
            yield from ((agent.name, path) for path in sorted(home.glob(place)))


def agent_of(path: Path) -> Agent | None:
    """The agent whose sessions a file or a folder has; None for anything else."""
    return next((agent for agent in AGENTS if agent.fits(path)), None)


def sessions(agent: Agent, path: Path) -> Iterator[list[dict[str, Any]]]:
    """The messages of each session in a file of an agent's, from the first of the user to the last answer. Raises
    ConversationError for a file that cannot be read."""
    try:
        for raw in agent.read(path):
            said = messages_of(raw, None) if raw else []
            last = max((i for i, one in enumerate(said) if one["role"] == "assistant"), default=0)
            if last:
                yield said[: last + 1]
    except (OSError, sqlite3.Error, KeyError, TypeError, AttributeError) as error:
        raise ConversationError(f"{path}: no session of {agent.name} can be read ({error})") from None


def _lines(path: Path, most: int | None = None) -> Iterator[Record]:
    """The objects in a file's lines. Other lines, such as the unfinished last line of a running session, are left out.
    """
    with opened(path, ConversationError) as file:
        for number, line in enumerate(file):
            if most is not None and number >= most:
                return
            try:
                value = loads(line)
            except NotJSON:
                continue
            if isinstance(value, Mapping):
                yield value


def _starts(path: Path, *kinds: str, keys: Sequence[str]) -> bool:
    """Whether an early line of a file has all of `keys`, and one of `kinds` as its type."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    try:
        return any(one.get("type") in kinds and all(key in one for key in keys) for one in _lines(path, 8))
    except ConversationError:
        return False


# Codex ---------------------------------------------------------------------------------------------------------------


def _codex(path: Path) -> Iterator[Messages]:
    """A session of Codex. Where it was compacted, the rest is another conversation."""
    items: list[Any] = []
    for line in _lines(path):
        payload = line.get("payload")
        if not isinstance(payload, Mapping):
            continue
        if line.get("type") == "session_meta" and not items:
            base = payload.get("base_instructions")
            text = base.get("text") if isinstance(base, Mapping) else payload.get("instructions")
            items += [{"type": "message", "role": "system", "content": text}] if isinstance(text, str) and text else []
        elif line.get("type") == "response_item":
            items.append({**payload, "timestamp": line.get("timestamp")})
        elif line.get("type") == "compacted":
            yield messages_of_items(items)
            kept = payload.get("replacement_history")
            summary = {"type": "message", "role": "user", "content": str(payload.get("message") or "")}
            items = [*kept] if isinstance(kept, list) else [summary]
    yield messages_of_items(items)


def messages_of_items(items: Iterable[Record]) -> Messages:
    """Messages of items of OpenAI's Responses. What the model wrote up to the next item of others is one answer."""
    made: Messages = []
    own: dict[str, Any] | None = None
    for item in items:
        part = _part(item)
        if part is None:
            continue
        part["timestamp"] = item.get("timestamp")
        if part["role"] != "assistant":
            own = None
            made.append(part)
        elif own is None or (own["content"] and part["content"]):
            own = {**part}
            made.append(own)
        else:
            calls = [*own.get("tool_calls", []), *part.get("tool_calls", [])]
            own["content"] = own["content"] or part["content"]
            own["timestamp"] = part["timestamp"]
            own["reasoning_content"] = own.get("reasoning_content", "") + part.get("reasoning_content", "")
            own |= {"tool_calls": calls} if calls else {}
    return [one for one in made if one["role"] != "assistant" or one["content"] or one.get("tool_calls")]


def _part(item: Record) -> dict[str, Any] | None:
    kind, role = item.get("type"), item.get("role")
    if kind == "message" or (kind is None and role):
        return {"role": role, "content": item.get("content") or ""}
    if kind == "reasoning":
        texts = [one.get("text") or "" for one in item.get("content") or item.get("summary") or ()]
        return {"role": "assistant", "content": "", "reasoning_content": "".join(texts)}
    if kind in ("function_call", "custom_tool_call", "local_shell_call"):
        given = item.get("arguments") or item.get("input") or item.get("action") or ""
        call = {"name": str(item.get("name") or kind), "arguments": given if isinstance(given, str) else dumps(given)}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        return {"role": "tool", "content": _text(item.get("output"))}
    return None


def _text(value: Any) -> str:
    """The text of a tool's result: a text, parts of a text, or an object with a text."""
    if isinstance(value, list):
        return "".join(str(one.get("text") or "") for one in value if isinstance(one, Mapping))
    if isinstance(value, Mapping):
        return _text(value.get("content") or value.get("output") or "")
    return str(value or "")


# Claude Code ---------------------------------------------------------------------------------------------------------


def _claude(path: Path) -> Iterator[Messages]:
    """The conversations in a file of Claude Code: the session, each agent that it started, and what follows where the
    session was compacted. Lines name the line before; of what was tried twice, the last try counts."""
    lines = [line for line in _lines(path) if line.get("type") in ("user", "assistant", "system") and line.get("uuid")]
    before = {line["uuid"]: line.get("parentUuid") for line in lines}
    by_id = {line["uuid"]: line for line in lines}
    last: dict[str, str] = {}  # The last line of each conversation, by its first line.
    first: dict[str, str] = {}
    for line in lines:
        parent = before[line["uuid"]]
        first[line["uuid"]] = first[parent] if parent in first else line["uuid"]
        last[first[line["uuid"]]] = line["uuid"]
    for end in last.values():
        walk: dict[str, Record] = {}
        at: str | None = end
        while at is not None and at in by_id and at not in walk:  # A broken file may lead in a circle.
            walk[at] = by_id[at]
            at = before[at]
        yield _of_blocks(reversed(walk.values()))


def _of_blocks(lines: Iterable[Record]) -> Messages:
    """Messages of Claude Code's lines. An answer's blocks have a line each, with the answer's id, and results of its
    first call may stand before its second."""
    made: Messages = []
    ids: list[Any] = []
    for line in lines:
        message = line.get("message")
        if not isinstance(message, Mapping) or line.get("isApiErrorMessage"):
            continue
        content = message.get("content") or ""
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        blocks = [block for block in blocks if block.get("type") != "redacted_thinking"]
        id = message.get("id") if line.get("type") == "assistant" else None
        at = next((i for i in range(len(ids) - 1, max(len(ids) - 3, -1), -1) if id is not None and ids[i] == id), None)
        if at is None and made and line.get("type") == "user" and made[-1]["role"] == "user":
            at = len(made) - 1
        if at is None:
            at = len(made)
            made.append({"role": message.get("role") or line["type"], "content": []})
            ids.append(id)
        made[at]["content"] += blocks
        made[at]["timestamp"] = line.get("timestamp")
    return made


# aider ---------------------------------------------------------------------------------------------------------------


def _aider(path: Path) -> Iterator[Messages]:
    """The chats in a history of aider: lines with `####` are the user's; aider's own, with `>`, are left out."""
    with opened(path, ConversationError) as file:
        text = file.read().decode("utf-8", "replace")
    for chat in re.split(r"^# aider chat started at .*$", text, flags=re.M)[1:]:
        made: Messages = []
        for line in chat.splitlines():
            if line.startswith(">") or (not line.strip() and not made):
                continue
            role = "user" if line.startswith("####") else "assistant"
            line = line[4:].lstrip(" ") if role == "user" else line
            if made and made[-1]["role"] == role:
                made[-1]["content"] += "\n" + line
            elif line.strip():
                made.append({"role": role, "content": line})
        yield [{**one, "content": one["content"].strip()} for one in made]


# opencode ------------------------------------------------------------------------------------------------------------


def _opencode_files(path: Path) -> Iterator[Messages]:
    """Sessions in opencode's folder `storage`: message/SESSION/MESSAGE.json and part/MESSAGE/PART.json."""

    def objects(folder: Path) -> list[Record]:
        values = (loads(file.read_bytes()) for file in sorted(folder.glob("*.json")))
        return [value for value in values if isinstance(value, Mapping)]

    for session in sorted((path / "message").iterdir()):
        said = sorted(objects(session), key=lambda one: (one.get("time") or {}).get("created") or 0)
        yield _of_parts((one, objects(path / "part" / str(one.get("id")))) for one in said)


def _opencode(path: Path) -> Iterator[Messages]:
    """Sessions in opencode's database: the tables `message` and `part` have JSON in the column `data`."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
        ids = [id for (id,) in base.execute("select id from session order by time_created")]
        for session in ids:
            asked = "select id, data from message where session_id = ? order by time_created, id"
            parts = "select data from part where message_id = ? order by id"
            yield _of_parts(
                (loads(data), [loads(part) for (part,) in base.execute(parts, (id,))])
                for id, data in base.execute(asked, (session,)).fetchall()
            )


def _of_parts(said: Iterable[tuple[Record, Sequence[Record]]]) -> Messages:
    """Messages of pairs (message, its parts). What a call gave back is kept with the call."""
    made: Messages = []
    for message, parts in said:
        texts = "".join(str(one.get("text") or "") for one in parts if one.get("type") == "text")
        thought = "".join(str(one.get("text") or "") for one in parts if one.get("type") == "reasoning")
        calls, results = list[dict[str, Any]](), Messages()
        for one in parts:
            if one.get("type") == "tool" and isinstance(state := one.get("state"), Mapping):
                call = {"name": str(one.get("tool")), "arguments": dumps(state.get("input") or {}, ensure_ascii=False)}
                calls.append({"type": "function", "function": call})
                results.append({"role": "tool", "content": _text(state.get("output") or state.get("error"))})
        if texts or calls:
            one = {"role": str(message.get("role")), "content": texts}
            one |= {"reasoning_content": thought} if thought else {}
            made += [one | ({"tool_calls": calls} if calls else {}), *results]
    return made


# Cline ---------------------------------------------------------------------------------------------------------------


def _cline(path: Path) -> Iterator[Messages]:
    with opened(path, ConversationError) as file:
        try:
            value = loads(file.read())
        except NotJSON as error:
            raise ConversationError(f"{path}: it is {error}") from None
    yield value if isinstance(value, list) else []


CODE = ".config/Code/User/globalStorage", "Library/Application Support/Code/User/globalStorage"
AGENTS = [
    Agent("codex", (".codex/sessions/**/rollout-*.jsonl", ".codex/archived_sessions/rollout-*.jsonl"),
          lambda path: _starts(path, "session_meta", "response_item", keys=("payload",)), _codex),
    Agent("claude", (".claude/projects/*/*.jsonl", ".claude/projects/*/*/subagents/*.jsonl"),
          lambda path: _starts(path, "user", "assistant", keys=("uuid", "message")), _claude),
    Agent("aider", (".aider.chat.history.md", "*/.aider.chat.history.md", "*/*/.aider.chat.history.md"),
          lambda path: path.is_file() and path.name.endswith("aider.chat.history.md"), _aider),
    Agent("opencode", (".local/share/opencode/opencode*.db",),
          lambda path: path.is_file() and path.suffix == ".db" and path.name.startswith("opencode"), _opencode),
    Agent("opencode", (".local/share/opencode/storage",),
          lambda path: (path / "message").is_dir() and (path / "part").is_dir(), _opencode_files),
    Agent("cline", (".cline/data/tasks/*/api_conversation_history.json",
                    *(f"{folder}/*/tasks/*/api_conversation_history.json" for folder in CODE)),
          lambda path: path.name == "api_conversation_history.json" and path.is_file(), _cline),
]  # fmt: skip
"""The agents whose sessions are read."""


def expanded(path: Path) -> list[Path]:
    """The files of a folder in which sessions are; a file, or a folder that is one agent's, as it is."""
    if not path.is_dir() or agent_of(path) is not None:
        return [path]
    inside = sorted(one for one in path.rglob("*") if one.suffix in (".jsonl", ".md", ".db", ".json") or one.is_dir())
    return list(dict.fromkeys(chain.from_iterable([one] for one in inside if agent_of(one) is not None)))


def answered(said: Sequence[Message]) -> list[int]:
    """The places of the model's messages."""
    return [i for i, one in enumerate(said) if one["role"] == "assistant" and i > 0]
