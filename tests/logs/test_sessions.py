"""What coding agents keep, read as conversations: each format as its agent writes it."""

import json
import sqlite3

import pytest

from paceline.formats.tokenizer import Tokenizer
from paceline.logs.conversations import Reading, read_trace
from paceline.logs.sessions import agent_of, found
from paceline.logs.transcript import Transcriber
from tests import models


def lines(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def item(**payload):
    return {"timestamp": "2026-11-29T10:00:00Z", "type": "response_item", "payload": payload}


def codex(home):
    text = [{"type": "input_text", "text": "Rename f."}]
    said = [{"type": "output_text", "text": "Done."}]
    return lines(
        home / ".codex/sessions/2026/11/29/rollout-2026-11-29T10-00-00-abc.jsonl",
        {"timestamp": "", "type": "session_meta", "payload": {"id": "abc", "base_instructions": {"text": "Be brief."}}},
        {"timestamp": "", "type": "turn_context", "payload": {"cwd": "/x"}},
        item(type="message", role="user", content=text),
        {"timestamp": "", "type": "event_msg", "payload": {"type": "user_message", "message": "Rename f."}},
        item(type="reasoning", summary=[{"type": "summary_text", "text": "I read it."}], encrypted_content="x"),
        item(type="function_call", name="shell", arguments='{"command": ["cat", "a.py"]}', call_id="1"),
        item(type="custom_tool_call", name="apply_patch", input="*** Begin Patch", call_id="2"),
        item(type="function_call_output", call_id="1", output="def f(): pass"),
        item(type="custom_tool_call_output", call_id="2", output={"content": "ok"}),
        item(type="message", role="assistant", content=said),
        {"timestamp": "", "type": "compacted", "payload": {"message": "They renamed f."}},
        item(type="message", role="user", content=[{"type": "input_text", "text": "And g?"}]),
        item(type="message", role="assistant", content=[{"type": "output_text", "text": "Too."}]),
    )


def line(uuid, parent, role, content, **more):
    message = {"role": role, "content": content} | ({"id": more.pop("id")} if "id" in more else {})
    return {"type": role, "uuid": uuid, "parentUuid": parent, "message": message, "sessionId": "s", **more}


def claude(home):
    used = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a.py"}}
    parts = [{"type": "text", "text": "g"}]
    other = {"type": "tool_use", "id": "t2", "name": "Read", "input": {"file_path": "b.py"}}
    return lines(
        home / ".claude/projects/-x/s.jsonl",
        {"type": "summary", "summary": "Renaming", "leafUuid": "9"},
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
        line("1", None, "user", "Rename f."),
        line("2", "1", "assistant", [{"type": "thinking", "thinking": "I read it.", "signature": "x"}], id="m1"),
        line("3", "2", "assistant", [{"type": "text", "text": "Reading."}], id="m1"),
        line("4", "3", "assistant", [used], id="m1"),
        line("5", "4", "user", [{"type": "tool_result", "tool_use_id": "t1", "content": "def f(): pass"}]),
        line("6", "5", "assistant", [other], id="m1"),
        line("7", "6", "user", [{"type": "tool_result", "tool_use_id": "t2", "content": parts}]),
        line("8", "7", "assistant", [{"type": "text", "text": "A wrong try."}], id="m2"),
        line("8b", "7", "assistant", [{"type": "text", "text": "API Error"}], id="m3", isApiErrorMessage=True),
        line("9", "7", "assistant", [{"type": "text", "text": "Done."}], id="m4"),
        line("a1", None, "user", "Look into b.py.", isSidechain=True),
        line("a2", "a1", "assistant", [{"type": "text", "text": "It has g."}], id="m5", isSidechain=True),
        {"type": "user", "uuid": "b", "message": "half"},
    )


def aider(home):
    path = home / "project/.aider.chat.history.md"
    path.parent.mkdir(parents=True)
    path.write_text(
        "\n# aider chat started at 2026-11-29 10:00:00\n\n> Aider v0.86.2  \n> Model: x  \n\n"
        "#### Rename f.  \n#### Now.  \n\na.py\n```\n# not a heading of aider's\ndef area(): pass\n```\n\n"
        "> Applied edit to a.py  \n\n#### Thanks  \n\nGladly.\n"
        "\n# aider chat started at 2026-11-29 11:00:00\n\n> Aider v0.86.2  \n\n#### Only asked  \n"
    )
    return path


PARTS = {
    "u": [{"type": "text", "text": "Rename f."}],
    "a": [
        {"type": "step-start"},
        {"type": "reasoning", "text": "I read it."},
        {"type": "text", "text": "Reading."},
        {"type": "tool", "tool": "read", "state": {"input": {"path": "a.py"}, "output": "def f()"}},
    ],
    "b": [{"type": "text", "text": "Done."}],
}
ROLES = {"u": "user", "a": "assistant", "b": "assistant"}


def opencode(home):
    path = home / ".local/share/opencode/opencode.db"
    path.parent.mkdir(parents=True)
    base = sqlite3.connect(path)
    base.executescript(
        "create table session (id text, time_created integer);"
        "create table message (id text, session_id text, time_created integer, data text);"
        "create table part (id text, message_id text, data text);"
    )
    base.execute("insert into session values ('s', 1)")
    for at, (id, parts) in enumerate(PARTS.items()):
        base.execute("insert into message values (?, 's', ?, ?)", (id, at, json.dumps({"role": ROLES[id]})))
        for number, part in enumerate(parts):
            base.execute("insert into part values (?, ?, ?)", (f"{id}{number}", id, json.dumps(part)))
    base.commit()
    base.close()
    return path


def opencode_folder(home):
    path = home / ".local/share/opencode/storage"
    for at, (id, parts) in enumerate(PARTS.items()):
        message = {"id": id, "role": ROLES[id], "time": {"created": at}}
        (path / "message/s").mkdir(parents=True, exist_ok=True)
        (path / f"message/s/{9 - at}.json").write_text(json.dumps(message, indent=2))
        (path / "part" / id).mkdir(parents=True)
        for number, part in enumerate(parts):
            (path / "part" / id / f"{number}.json").write_text(json.dumps(part, indent=2))
    return path


def cline(home):
    path = home / ".cline/data/tasks/17/api_conversation_history.json"
    path.parent.mkdir(parents=True)
    used = {"type": "tool_use", "id": "1", "name": "read_file", "input": {"path": "a.py"}}
    path.write_text(json.dumps([
        {"role": "user", "content": [{"type": "text", "text": "Rename f."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Reading."}, used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "def f()"}]},
        {"role": "assistant", "content": "Done."},
    ], indent=1))  # fmt: skip
    return path


def said(conversation):
    """(role, text, names of the functions called) of each message."""
    calls = [[call["function"]["name"] for call in one.get("tool_calls", ())] for one in conversation.messages]
    return [(one["role"], one["content"], *names) for one, names in zip(conversation.messages, calls, strict=True)]


THOUGHT = "<think>\nI read it.\n</think>\n\n"
CODEX = [
    [
        ("system", "Be brief."), ("user", "Rename f."), ("assistant", THOUGHT, "shell", "apply_patch"),
        ("tool", "def f(): pass"), ("tool", "ok"), ("assistant", "Done."),
    ],
    [("user", "They renamed f."), ("user", "And g?"), ("assistant", "Too.")],
]  # fmt: skip
CLAUDE = [
    [
        ("user", "Rename f."), ("assistant", f"{THOUGHT}Reading.", "Read", "Read"), ("tool", "def f(): pass"),
        ("tool", "g"), ("assistant", "Done."),
    ],
    [("user", "Look into b.py."), ("assistant", "It has g.")],
]  # fmt: skip
AIDER = [[
    ("user", "Rename f.  \nNow."), ("assistant", "a.py\n```\n# not a heading of aider's\ndef area(): pass\n```"),
    ("user", "Thanks"), ("assistant", "Gladly."),
]]  # fmt: skip
READ = ("assistant", "Reading.", "read"), ("tool", "def f()"), ("assistant", "Done.")
OPENCODE = [[("user", "Rename f."), ("assistant", f"{THOUGHT}Reading.", "read"), *READ[1:]]]
CLINE = [[("user", "Rename f."), ("assistant", "Reading.", "read_file"), *READ[1:]]]
WRITTEN = {
    "codex": (codex, CODEX), "claude": (claude, CLAUDE), "aider": (aider, AIDER), "opencode": (opencode, OPENCODE),
    "opencode's folder": (opencode_folder, OPENCODE), "cline": (cline, CLINE),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_an_agent_keeps_is_found_and_read(name, tmp_path):
    write, expected = WRITTEN[name]
    path = write(tmp_path)
    agent = name.split("'")[0]
    assert [*found(tmp_path)] == [(agent, path)]
    conversations = read_trace(path)
    assert [said(one) for one in conversations] == expected
    assert {(one.category, one.where) for one in conversations} == {(agent, str(path))}
    assert all(one.messages[i]["role"] == "assistant" for one in conversations for i in one.answers)
    transcriber = Transcriber(Tokenizer(models.tokenizer()))
    transcripts = [*transcriber.conversations(conversations, Reading(strict=True))]
    assert [len(one.turns) for one in transcripts] == [sum(role == "assistant" for role, *_ in one) for one in expected]


def test_a_folder_has_all_of_its_sessions(tmp_path):
    for write in (codex, claude, aider, opencode, opencode_folder, cline):
        write(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"prompt": "x", "response": "y"}\n')
    conversations = read_trace(tmp_path)
    assert sorted(one.category for one in conversations) == [
        "aider", "claude", "claude", "cline", "codex", "codex", "opencode", "opencode",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"not a database", b""])
def test_a_broken_file_is_one_line(tmp_path, content):
    path = tmp_path / "opencode.db"
    path.write_bytes(content)
    with pytest.raises(Exception, match=r"opencode.db: no session of opencode can be read"):
        read_trace(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match=r"empty: in this folder are no sessions of codex, claude, aider, opencode"):
        read_trace(tmp_path / "empty")
    assert agent_of(tmp_path / "empty") is None
    broken = tmp_path / "api_conversation_history.json"
    broken.write_text("[{")
    with pytest.raises(Exception, match=r"api_conversation_history.json: it is "):
        read_trace(broken)


def test_a_session_that_leads_in_a_circle_ends(tmp_path):
    said = [line("1", "2", "user", "Hi."), line("2", "1", "assistant", [{"type": "text", "text": "Ho."}], id="m")]
    path = lines(tmp_path / "s.jsonl", *said)
    assert len(read_trace(path)) == 1


def test_messages_have_the_times_of_their_last_lines(tmp_path):
    """An answer ends with its last block; results are there when the last of them is."""
    file = lines(
        tmp_path / "s.jsonl",
        line("1", None, "user", "Rename f.", timestamp="2026-11-29T10:00:00Z"),
        line("2", "1", "assistant", [{"type": "text", "text": "I"}], id="m", timestamp="2026-11-29T10:00:04.500Z"),
        line("3", "2", "assistant", [{"type": "text", "text": " do."}], id="m", timestamp="2026-11-29T10:00:06Z"),
        line("4", "3", "user", "And g.", timestamp="soon"),
        line("5", "4", "assistant", [{"type": "text", "text": "Too."}], id="n", timestamp=10**400),
    )
    (conversation,) = read_trace(file, reading=Reading())
    begin = conversation.messages[0]["at"]
    assert [one.get("at", 0) - begin for one in conversation.messages] == [0, 6, -begin, -begin]
    (first, _) = read_trace(codex(tmp_path), reading=Reading())
    assert [one.get("at") for one in first.messages] == [None, *[begin] * (len(first.messages) - 1)]
