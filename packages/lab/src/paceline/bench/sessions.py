"""Replay whole sessions of a coding agent on servers: how long a person waits, and how much of each prompt is reused.

    measure(Sessions(Path("sessions.jsonl"), servers={"suffix": [...command...]}, out=Path("runs/agent")))

Each message of the assistant is a turn, asked with the recorded messages before it. The turns of a session follow each
other, so that a server can reuse the computation of the turn before. Servers take turns at every session; servers begun
here are paused while another is asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

from paceline.bench.options import OF_LOG, Result, Sessions
from paceline.bench.record import is_looping
from paceline.core.tally import Tally
from paceline.errors import PacelineError
from paceline.logs.bodies import Message
from paceline.logs.conversations import Reading, read_trace
from paceline.logs.formats import Conversation
from paceline.net.client import Retry
from paceline.net.completion import CompletionError
from paceline.net.endpoint import OutOfTime, Remote, Started
from paceline.runs.environment import environment
from paceline.runs.progress import Progress
from paceline.runs.report import COLORS, Curve, Plots, Report, Section, Table, plot
from paceline.runs.runs import Lines, Run, read_about, rows

KIND, TURNS, SUMMARY = "sessions", "turns.jsonl", "summary.json"
"""The kind of run for `runs.runs`, and two of its files."""
LONGEST_PAUSE = 60.0
"""The longest pause of a log that is waited, in seconds."""
ANSWER_SECONDS = 3600.0  # After so long without a byte a server counts as hanging.
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}


@dataclass(frozen=True)
class Session:
    """A session: the body of the request for each turn, and seconds to wait before it."""

    name: str
    turns: Sequence[Mapping[str, Any]]
    pauses: Sequence[float]


def measure(asked: Sessions, progress: Progress = Progress()) -> Result:
    """Run, or continue, the sessions in `asked.out`. Raises PacelineError for wrong options."""
    reading, out = Reading(), asked.out or Path("sessions")
    sessions = read_sessions(asked, reading)
    names = [*asked.commands, *asked.urls]
    if not names:
        raise PacelineError("no server is named: give a model, a server's address or a command that begins one")
    identity = {
        "log": asked.log.name, "turns": sum(len(one.turns) for one in sessions), "servers": names,
        **{name: getattr(asked, name) for name in ("max_tokens", "batch", "pause", "limit")},
    }  # fmt: skip
    about = {"environment": environment(dtype="of the servers", device="of the servers")}
    with Run.open(out, KIND, identity, **about) as run:
        lines = run.lines(TURNS)
        left = [
            (name, group)
            for number, group in enumerate(sessions[i : i + asked.batch] for i in range(0, len(sessions), asked.batch))
            for name in (*names[number % len(names) :], *names[: number % len(names)])
            if not all(_key(name, one, turn) in lines for one in group for turn in range(len(one.turns)))
        ]
        with _servers(asked, progress, {name for name, _ in left}) as servers:
            for at, (name, group) in enumerate(left):
                progress.step(at, len(left))
                if not progress.stopped():
                    _ask(asked, servers, name, group, lines, progress)
        known = _last(lines)
        results, notes = summarize(known, names), [*reading.notes()]
        complete = len(known) == len(names) * identity["turns"]
        run.write(SUMMARY, {"complete": complete, "results": results, "notes": notes})
    return Result(out, complete, results, notes)


def read_sessions(asked: Sessions, reading: Reading) -> list[Session]:
    """Read the sessions of the log, as bodies of requests. Raises PacelineError if it has none."""
    made = []
    for i, one in enumerate(read_trace(asked.log, limit=asked.limit, reading=reading), 1):
        name = str(one.record.get("id") or f"session {i}")
        pauses = _pauses(one) if asked.pause == OF_LOG else [0.0, *[float(asked.pause)] * len(one.answers)]
        made.append(Session(name, [_body(one, at, asked.max_tokens) for at in one.answers], pauses))
    if asked.pause == OF_LOG and not any(any(one.pauses) for one in made):
        raise PacelineError(f"{asked.log} has no times of its messages, so --pause log has no pauses; give seconds")
    names = {one.name for one in made}
    return made if len(names) == len(made) else [replace(one, name=f"{one.name}/{i}") for i, one in enumerate(made)]


def _pauses(one: Conversation) -> list[float]:
    """Seconds before each answer in which tools or a person did something: from the answer before to the last message
    before this one, at most LONGEST_PAUSE; 0 where the log has no times."""
    pauses = [0.0]
    for before, at in pairwise(one.answers):
        began, ended = (one.messages[place].get("at") for place in (before, at - 1))
        took = 0.0 if began is None or ended is None else ended - began
        pauses.append(min(max(took, 0.0), LONGEST_PAUSE))
    return pauses


def _body(one: Conversation, at: int, most: int) -> dict[str, Any]:
    body = {"messages": _messages(one.messages[:at]), "max_tokens": most, **STREAMED}
    return body | ({"tools": list(one.tools)} if one.tools else {})


def _messages(said: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form of servers: each call has an id, which its result names."""
    made, open_ = [], list[str]()
    for number, message in enumerate(said):
        one = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        one.setdefault("content", "")
        if calls := one.get("tool_calls"):
            open_ = [f"call_{number}_{i}" for i in range(len(calls))]
            one["tool_calls"] = [{**call, "type": "function", "id": id} for call, id in zip(calls, open_, strict=True)]
        if one["role"] == "tool":
            one["tool_call_id"] = open_.pop(0) if open_ else f"call_{number}"
        made.append(one)
    return made


@contextmanager
def _servers(asked: Sessions, progress: Progress, wanted: Collection[str]) -> Iterator[dict[str, Remote]]:
    """Start and pause the wanted servers, for as long as the context lasts."""
    with ExitStack() as stack:
        made = {name: Remote(url, key=asked.keys.get(name)) for name, url in asked.urls.items()}
        for name, command in asked.commands.items():
            if name not in wanted:
                continue
            progress.say(f"starting {name}")
            made[name] = stack.enter_context(Started(command))
            made[name].pause(True)
        progress.say("asking")
        yield made


def _ask(
    asked: Sessions, servers: Mapping[str, Remote], name: str, group: Sequence[Session], lines: Lines,
    progress: Progress,
) -> None:  # fmt: skip
    """Ask one server for a group of sessions, side by side."""
    server = servers[name]
    server.pause(False)
    try:
        with ThreadPoolExecutor(len(group)) as pool:
            for done in [pool.submit(_session, asked, server, name, one, lines, progress) for one in group]:
                done.result()
    finally:
        server.pause(True)


def _session(
    asked: Sessions, server: Remote, name: str, session: Session, lines: Lines, progress: Progress
) -> None:  # fmt: skip
    spec = asked.urls.get(name, server.url)
    with Remote(spec, key=server.key, slots=1, timeout=ANSWER_SECONDS, retry=Retry(tries=1)) as remote:
        remote.over = progress.stopped
        for number, body in enumerate(session.turns):
            if progress.stopped():
                return
            _wait(session.pauses[number], progress)
            row = {"key": _key(name, session, number), "server": name, "session": session.name, "turn": number}
            try:
                (done,) = remote.ask([body])
            except OutOfTime:
                return
            except CompletionError as error:
                progress.note(f"{name}: {session.name}, turn {number + 1} failed: {error}")
                lines.append({**row, "failed": str(error)})
                continue
            details = done.usage.get("prompt_tokens_details") or {}
            lines.append({
                **row, "prompt": done.prompt_tokens, "reused": details.get("cached_tokens"), "new": done.num_new,
                "rounds": done.rounds, "first": round(done.times[0] if done.times else done.seconds, 4),
                "seconds": round(done.seconds, 4), "looping": is_looping((done.reasoning + done.text).split()),
            })  # fmt: skip


def _wait(seconds: float, progress: Progress) -> None:
    """Sleep, or until the run is stopped."""
    end = monotonic() + seconds
    while (left := end - monotonic()) > 0 and not progress.stopped():
        sleep(min(left, 0.2))


def _key(server: str, session: Session, turn: int) -> str:
    return f"{server}|{session.name}|{turn}"


def _last(lines: Lines | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last row of every turn, since a turn may be asked again."""
    return [*{row["key"]: dict(row) for row in lines}.values()]


def summarize(turns: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of each server over the turns that every server answered, in the order of `names`.

    waiting           seconds that a person waits for all answers; over: this as a share of the first server's.
    reused_of_before  share of the tokens of the earlier turn's prompt that were reused.
    looping           share of the answers that end in a loop of words, which is the easiest text to draft."""
    by_server = {name: {(r["session"], r["turn"]): r for r in turns if r["server"] == name} for name in names}
    good = [{at for at, row in of.items() if "failed" not in row} for of in by_server.values()]
    both = set.intersection(*good) if good else set()
    made = list[dict[str, Any]]()
    for name, of in by_server.items():
        own = [of[at] for at in sorted(both)]
        follow = [row for row in own if (row["session"], row["turn"] - 1) in both]
        before = [(row, of[row["session"], row["turn"] - 1]) for row in follow]
        seconds, new = sum(row["seconds"] for row in own), sum(row["new"] for row in own)
        after = sum(row["seconds"] - row["first"] for row in own)
        rounds = Tally.of(Tally(row["new"], row["rounds"]) for row in own if row["rounds"])
        reused = [row["reused"] for row in own if row["reused"] is not None]
        of_before = sum(one["prompt"] for _, one in before)
        known = bool(of_before) and all(row["reused"] is not None for row, _ in before)
        made.append({
            "server": name, "turns": len(own), "failed": sum("failed" in row for row in of.values()),
            "waiting": round(seconds, 3), "over": round(seconds / made[0]["waiting"], 4) if made and seconds else None,
            "first_p50": median([row["first"] for row in own]) if own else None,
            "first_p90": sorted(row["first"] for row in own)[int(0.9 * len(own))] if own else None,
            "new": new, "tokens_per_second": round(new / seconds, 3) if seconds else None,
            "decode_per_second": round((new - len(own)) / after, 3) if after > 0 else None,
            "tokens_a_round": round(rounds.mean_accepted_tokens, 4) if rounds.rounds else None,
            "looping": round(sum(row["looping"] for row in own) / len(own), 4) if own else None,
            "prompt": sum(row["prompt"] for row in own), "reused": sum(reused) if reused else None,
            "reused_of_before": round(sum(min(row["reused"], one["prompt"]) for row, one in before) / of_before, 4)
            if known else None,
            "sessions": {
                session: round(sum(row["seconds"] for row in own if row["session"] == session), 3)
                for session in dict.fromkeys(row["session"] for row in own)
            },
        })  # fmt: skip
    for row in made[:1]:
        row["over"] = 1.0
    return made


# The page ------------------------------------------------------------------------------------------------------------


def page(folder: Path) -> str:
    """The page of a run."""
    about, turns = read_about(folder, KIND), _last([*rows(folder / TURNS)])
    names = about["identity"]["servers"]
    results = summarize(turns, names)
    columns = (
        "waiting, s = waiting:1; over the first = over:2; first word,\nP50 s = first_p50:2; P90 s = first_p90:2; "
        "tokens/s\nafter it = decode_per_second:1; tokens\na round = tokens_a_round:2; looping = looping:%; "
        "prompt\ntokens = prompt:0; "
        "reused = reused:0; of the turn\nbefore = reused_of_before:%1; turns = turns:0; failed = failed:0"
    )
    curves = []
    for i, name in enumerate(names):
        waits, total = list[tuple[float, float]](), 0.0
        for at, row in enumerate((row for row in turns if row["server"] == name and "failed" not in row), 1):
            total += row["seconds"]
            waits.append((at, total))
        tips = [f"{name}: {y:.1f} s after {x:.0f} turns" for x, y in waits]
        curves.append(Curve(waits, tips, [COLORS[i % len(COLORS)]] * len(waits), name))
    sessions = dict.fromkeys(session for row in results for session in row["sessions"])
    cells = [{str(i): row["sessions"].get(session) for i, row in enumerate(results)} for session in sessions]
    by_session = "".join(f"{name}, s = {i}:1; " for i, name in enumerate(names))
    return Report(
        f"Sessions of a coding agent: {about['identity']['log']}",
        ["Each message of the assistant is a turn, asked with the recorded messages before it."],
        [
            Section("What a person waits", [Table.of(results, columns, ("server", names))]),
            Section("Waiting, turn by turn", [Plots([("", plot(curves, "turns", "seconds"))])]),
            Section("By session", [Table.of(cells, by_session, ("session", list(sessions)))]),
        ],
    ).html()


def summary(folder: Path) -> dict[str, Any]:
    """The figures of a run, for --json."""
    names = read_about(folder, KIND)["identity"]["servers"]
    return {"results": summarize(_last([*rows(folder / TURNS)]), names)}


