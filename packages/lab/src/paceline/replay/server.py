"""Measure the cost of rounds on a running server, over HTTP, with a user's own prompts, and write its configuration.

    tuning = ServerTuning({DRAFTS: server, PLAIN: other}, conversations, transcriber, loads=[1, 8], seconds=600)
    tuning.measure(folder)                         # visits.jsonl: raw times of every request
    facts, choices = tuning.advise(folder, Goals(), "log.jsonl")

A visit sends a few requests of one length to a server, with a fixed number (the load) under way. Passes over all loads,
lengths and servers are repeated until the time is over, small loads first, the servers in turn. When it is stopped,
connections are closed at once, and finished visits are kept. Texts of answers are kept only if the log has no answers,
since drafters are then replayed on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import Any

import numpy as np

from paceline.draft.cost import DraftTimes, Prices, Table
from paceline.draft.recording import Recording
from paceline.errors import PacelineError, PromptError
from paceline.logs.bodies import ConversationError
from paceline.logs.conversations import Reading
from paceline.logs.formats import Conversation
from paceline.logs.transcript import Transcriber, Transcript
from paceline.net.completion import Completion
from paceline.net.servers import Drafting, Request, Server, fingerprint, requests_of
from paceline.outputs import write_json
from paceline.replay import advice
from paceline.replay.advice import CONFIGURATION, DRAWS, ENGINES, SIZES, Choice, Costs, Drafts, Floats, Goals, Method
from paceline.replay.workers import start
from paceline.runs.runs import Run, rows

Visit = dict[str, Any]
"""A row of the visits: role, load, length, seconds, failed requests, what the counters moved by, and the answers."""
DRAFTS, PLAIN = "drafts", "plain"  # Roles: the server as it runs, and the server without drafts.
VISITS, TABLE = "visits.jsonl", "tune.json"  # Files of the folder.
EXTRA = 4  # A visit has so many requests more than twice the load.
MOST_FAILED = 0.2  # If a larger share of a visit's requests fails, this load and higher ones are not visited again.
APART, FEWEST = 3.0, 24
"""Prompts are put into three lengths if the longest tenth is so many times as long as the shortest, and there are
enough of them."""
NO_PLAIN = (
    "the server drafts, and what its rounds take without drafts is unknown: name the same model served without them, "
    "--against URL, or start it without"
)
FITTED = (0, 1, 2, 4, 8)  # A table for our engine is fitted at these numbers of drafted tokens of a request.


def bins_of(sizes: Sequence[int]) -> list[int]:
    """Sort prompts by their numbers of tokens into lengths 0 to 2; all 0 if they are about equally long."""
    low, high = np.percentile(sizes, [10, 90])
    if len(sizes) < FEWEST or high < APART * max(low, 1):
        return [0] * len(sizes)
    return list(np.searchsorted(np.percentile(sizes, [100 / 3, 200 / 3]), sizes).tolist())


@dataclass
class ServerTuning:
    """What to measure.

    servers        by role, DRAFTS or PLAIN; loads: requests at once, ascending.
    conversations  their prompts are asked, their answers are replayed.
    seconds        for all visits together; max_tokens: most tokens of an answer.
    stopped, step  returns whether to stop; called with the seconds of each visit.
    reading        counts conversations left out because the chat template refuses them."""

    servers: Mapping[str, Server]
    conversations: Sequence[Conversation]
    transcriber: Transcriber
    loads: Sequence[int]
    seconds: float
    max_tokens: int = 64
    stopped: Callable[[], bool] = lambda: False
    step: Callable[[float], None] = lambda seconds: None
    lengths: dict[str, int] = field(init=False)
    reading: Reading = field(default_factory=Reading)

    def __post_init__(self) -> None:
        self._requests: dict[str, Request] = {}
        sizes = []
        for n, one in enumerate(self.conversations):
            try:
                found = {r.id: r for r in requests_of(one, str(n))}
                sizes += [self._size(r) for r in found.values()]
                self._requests |= found
            except PromptError as error:
                self.reading.skip(ConversationError(f"{one.where}: {error}"))
        if not self._requests:
            raise PacelineError(self.reading.first or "there is no prompt that could be asked")
        self.lengths = dict(zip(self._requests, bins_of(sizes), strict=True))
        said = [one.answers or (one.tokens and one.tokens[0]) for one in self.conversations]
        self._answered = [n for n, has_answer in enumerate(said) if has_answer]

    def _size(self, one: Request) -> int:
        """Number of tokens of a request's prompt. Raises PromptError."""
        if isinstance(one.prompt, str):
            return len(self.transcriber.tokenizer.encode_text(one.prompt))
        return len(one.prompt) or len(self.transcriber.prompt(one.messages, one.tools))

    def measure(self, folder: Path) -> None:
        """Make visits while there is time, beside those in the folder.
        Raises PacelineError if a server fails altogether."""
        servers = {role: {"url": s.url, "model": s.model, "engine": s.engine} for role, s in self.servers.items()}
        identity = {"servers": servers, "loads": list(self.loads), "max_tokens": self.max_tokens}
        with Run.open(folder, "tune", identity | {"prompts": fingerprint(list(self._requests.values()))}) as run:
            visits, most = run.lines(VISITS), max(self.loads)
            spent = sum(visit["seconds"] for visit in visits)
            self.step(spent)
            for key, role, load, length in self._plan():
                if key in visits or load > most:
                    continue
                if self.stopped() or spent >= self.seconds:
                    return
                visit = self._visit(role, load, length, key, warm=not len(visits))
                if visit is None:
                    return
                if PLAIN not in self.servers and (visit["drafting"] or {}).get("drafts"):
                    raise PacelineError(NO_PLAIN)
                visits.append(visit)
                spent += visit["seconds"]
                self.step(visit["seconds"])
                if visit["failed"] > MOST_FAILED * (visit["failed"] + len(visit["answers"])):
                    most = max((other for other in self.loads if other < load), default=load)

    def _plan(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield key, role, load and length of visits, without end."""
        for number in count():
            for load in self.loads:
                for length in sorted(set(self.lengths.values())):
                    for role in sorted(self.servers, reverse=bool(number % 2)):
                        yield f"{role} {load} {length} {number}", role, load, length

    def _visit(self, role: str, load: int, length: int, key: str, warm: bool) -> Visit | None:
        """Make a visit; None if it was stopped. warm: whether to send a few requests before it."""
        server, size, number = self.servers[role], 2 * load + EXTRA, int(key.rpartition(" ")[2])
        there = [one for one in self._requests.values() if self.lengths[one.id] == length]
        chosen = [there[(number * size + i) % len(there)] for i in range(size)]
        more = {"draft": "none"} if role == PLAIN and server.engine == "paceline" else {}
        bodies = [server.body(one, self.max_tokens, **more) for one in chosen]
        if warm:
            server.send(bodies[:2], stopped=self.stopped)
        before, began = server.drafting(), perf_counter()
        answers = server.send(bodies, load, stopped=self.stopped)
        seconds, after = perf_counter() - began, server.drafting()
        if None in answers:
            return None
        done = [(one, answer) for one, answer in zip(chosen, answers, strict=True) if isinstance(answer, Completion)]
        if not done:
            raise PacelineError(str(answers[0]))
        facts = [
            {
                "request": one.id,
                "began": round(answer.began - began, 6),
                "prompt": answer.prompt_tokens,
                "tokens": answer.usage.get("completion_tokens") or len(answer.times),
                "times": [round(at, 6) for at in answer.times],
                **({} if self._answered else {"text": answer.text}),
            }
            for one, answer in done
        ]
        drafting = asdict(after.since(before)) if before and after else None
        visit = {"key": key, "role": role, "load": load, "length": length, "seconds": round(seconds, 4)}
        return visit | {"failed": len(answers) - len(done), "drafting": drafting, "answers": facts}

    def advise(self, folder: Path, goals: Goals, log: Path | None) -> tuple[dict[str, Any], list[Choice]]:
        """Returns the facts, with configuration and expected results, which are also written to the folder, and each
        engine's best choice.

        log  prompts for the commands that check the advice; None: those of bench's suite."""
        visits, server = list(rows(folder / VISITS)), self.servers[DRAFTS]
        costs, own, notes = costs_of(visits, server.engine)
        engines = [server.engine] if server.engine in ENGINES else list(ENGINES)
        replayed, drafting = self._replay(engines, visits)
        every = advice.choose(costs, [*own, *replayed], goals)
        choices = [next(choice for choice in every if choice.method.engine == engine) for engine in engines]
        written = [advice.configuration(choice, server.facts["version"]) for choice in choices]
        if engines == ["paceline"]:
            write_json(folder / TABLE, self._table(costs, drafting), indent=2)
            if any(choices[0].schedule.values()):
                names = "|".join(drafting)
                written[0]["flags"] = f"--draft {quote(f'auto:{names},table={folder / TABLE}')}"
        plain, asked = costs.plain[0].mean(1), "" if log is None else f" --log {log}"
        facts = {
            "configurations": written,
            "goals": goals._asdict(),
            "expected": [{"method": c.method.name, **one._asdict()} for c in choices for one in c.expected],
            "plain_ms": dict(zip(costs.loads, np.round(1e3 * plain, 4).tolist(), strict=True)),
            "token_cost": {load: round(costs.relative(i, 1.0) - 1, 4) for i, load in enumerate(costs.loads)},
            "notes": [*notes, *(line for choice in choices for line in advice.not_chosen(choice))],
            "check": [
                f"paceline bench server {self.servers.get(PLAIN, server).url} URL_OF_THE_NEW_ONE{asked} "
                f"--batch {load} --max-tokens {self.max_tokens} --out {folder / f'check-{load}'}"
                for load in dict.fromkeys((costs.loads[0], costs.loads[-1]))
            ],
        }
        write_json(folder / CONFIGURATION, facts)
        return facts, choices

    def _replay(self, engines: Sequence[str], visits: Sequence[Visit]) -> tuple[list[Drafts], dict[str, float]]:
        """Replay the engines' methods on the answers. Returns their drafts' results, and the seconds of each of our
        drafters for a request's round."""
        found = [(str(n), self.conversations[n]) for n in self._answered]
        if not found:
            texts = {answer["request"]: answer["text"] for visit in visits for answer in visit["answers"]}
            for id, text in texts.items():
                prompt = self._requests[id].prompt
                read = [{"role": "user", "content": prompt}] if prompt else self._requests[id].messages
                messages = [*read, {"role": "assistant", "content": text}]
                found.append((id, Conversation(messages, [len(messages) - 1], is_rendered=bool(prompt))))
        asked = [(id, one) for id, one in found if id in self.lengths]
        accepted = [(id, made) for id, one in asked for made in self.transcriber.conversations([one], Reading())]
        if not accepted:
            raise PacelineError("the chat template refuses every answer that is replayed; --template names another")
        transcripts: list[Transcript] = [made for _, made in accepted]
        every = [method for engine in engines for method in advice.methods(engine)]
        specs = {method.replay.format(k=k): (method, k) for method in every for k in SIZES}
        counts, seconds = np.zeros((len(specs), len(transcripts), 3)), np.zeros(len(specs))
        for done in start(transcripts, list(specs), Recording.of(self.transcriber.tokenizer), stopped=self.stopped):
            counts[done.spec, done.conversation] = done.tally.new_tokens, done.tally.rounds, done.tally.draft_tokens
            seconds[done.spec] += done.tally.seconds
        kept = counts[:, :, 1].min(0) > 0
        bins = np.array([self.lengths[id] for id, _ in accepted])[kept]
        drafts = [
            Drafts(method, k, tokens, rounds, drafted, bins)
            for (method, k), (tokens, rounds, drafted) in zip(
                specs.values(), counts[:, kept].transpose(0, 2, 1), strict=True
            )
        ]
        each = zip(specs.values(), seconds / np.maximum(counts[:, :, 1].sum(1), 1), strict=True)
        return drafts, {method.name: float(of) for (method, _), of in each if method.engine == "paceline"}

    def _table(self, costs: Costs, drafting: Mapping[str, float]) -> dict[str, Any]:
        """Make a table for `auto`, if the server is ours."""
        prices = Prices(fade=1.0)
        for i, load in enumerate(costs.loads):
            for k in FITTED:
                seconds = [costs.round(i, b, k)[0] if k else costs.plain[0, i, b] for b in range(len(costs.contexts))]
                context = round(load * float(np.mean(costs.contexts)))
                for _ in range(2):  # The first round of a shape does not count.
                    prices.note(load, load * k, context, float(np.mean(seconds)))
        prices.fit()
        table = Table(prices, {name: DraftTimes(0.0, seconds) for name, seconds in drafting.items()})
        model = {"name": self.servers[DRAFTS].model, "fingerprint": ""}
        return {"paceline": "tune", "model": model, **table.to_json(), "context": round(float(np.mean(costs.contexts)))}


# From visits to costs ------------------------------------------------------------------------------------------------


def costs_of(visits: Sequence[Visit], engine: str) -> tuple[Costs, list[Drafts], list[str]]:
    """Returns the costs of rounds, the results of the server's own drafts by their largest number of tokens, and notes.

    Raises PacelineError if fewer than two loads were measured with prompts of all lengths."""
    cells: dict[tuple[str, int, int], list[Visit]] = {}
    for visit in visits:
        cells.setdefault((visit["role"], visit["load"], visit["length"]), []).append(visit)
    counted = {key[1:]: _Counted(of_cell) for key, of_cell in cells.items() if key[0] == DRAFTS}
    drafted = {shape: each for shape, each in counted.items() if each.sums[1]}
    role = PLAIN if any(key[0] == PLAIN for key in cells) else DRAFTS
    lengths = sorted({length for _, _, length in cells})
    loads = [n for n in sorted({key[1] for key in cells}) if all((role, n, length) in cells for length in lengths)]
    if len(loads) < 2:
        raise PacelineError("fewer than two loads were measured with all lengths of prompts; give more --minutes")
    timed = {(i, b): _times(cells[role, n, length]) for i, n in enumerate(loads) for b, length in enumerate(lengths)}
    rounds, means = (
        np.stack([np.stack([timed[i, b][which] for b in range(len(lengths))], -1) for i in range(len(loads))], 1)
        for which in (0, 1)
    )
    waits = np.maximum(means - rounds, 0.0)
    of_length = [[a for visit in visits if visit["length"] == length for a in visit["answers"]] for length in lengths]
    contexts = [float(np.mean([a["prompt"] + a["tokens"] / 2 for a in answers])) for answers in of_length]
    plain = np.maximum.accumulate(rounds, axis=1)  # More requests never take less time.
    costs = Costs(loads, contexts, plain, waits, {at: firsts for at, (_, _, firsts) in timed.items()})
    measured = []
    for (load, length), each in drafted.items():
        if load in loads:
            i, b = loads.index(load), lengths.index(length)
            seconds = (_times(cells[DRAFTS, load, length])[1] - waits[:, i, b]) * each.tokens / each.rounds
            measured.append((i, b, each.sums[1] / each.rounds, seconds))
    if measured:
        costs.calibrate(measured)
    notes = []
    if not any(visit["drafting"] for visit in visits):
        notes.append("The server has no /metrics: whether it drafts, and what was accepted, is unknown.")
    if any(each.foreign for each in drafted.values()):
        notes.append("Others used the server meanwhile: its counters hold their drafts, and rounds took longer.")
    return costs, _own(list(drafted.values()), engine), notes


class _Counted:
    """Counts of visits. tokens: new tokens after the first of each answer; sums: drafts, drafted, accepted and written
    tokens by the server's counters; places: accepted tokens at each position;
    foreign: whether the server also answered others."""

    def __init__(self, visits: Sequence[Visit]):
        seen = [Drafting(**visit["drafting"]) for visit in visits if visit["drafting"]]
        answers = [answer for visit in visits for answer in visit["answers"]]
        self.tokens = float(sum(answer["tokens"] - 1 for answer in answers))
        self.sums = [sum(getattr(one, name) for one in seen) for name in ("drafts", "drafted", "accepted", "tokens")]
        self.places = np.zeros(max((len(one.by_position) for one in seen), default=0))
        for one in seen:
            self.places[: len(one.by_position)] += one.by_position
        self.foreign = self.sums[3] > 1.1 * (self.tokens + len(answers))
        deliveries = float(sum(len(answer["times"]) - 1 for answer in answers))
        self.rounds = max(deliveries if self.foreign else self.tokens - self.sums[2], 1.0)


def _times(visits: Sequence[Visit]) -> tuple[Floats, Floats, Floats]:
    """Returns seconds of a round without others' prompts [DRAWS], seconds a token [DRAWS], and seconds to first tokens.

    A visit counts until its last request was sent, because the load was full until then."""
    rounds, means, firsts = [], [], []
    for visit in visits:
        last = max(answer["began"] for answer in visit["answers"])
        for answer in visit["answers"]:
            at = np.array(answer["times"])
            firsts += answer["times"][:1]
            gaps = np.diff(at if visit["load"] == 1 else at[answer["began"] + at <= last])
            if len(gaps):
                share = (len(at) - 1) / max(answer["tokens"] - 1, 1)  # A delivery may hold several tokens.
                rounds.append(float(np.median(gaps)) * share)
                means.append(float(np.mean(gaps)) * share)
    if not rounds:
        raise PacelineError("answers came in one piece, and nothing can be timed: the server does not stream")
    drawn = np.random.default_rng(0).integers(len(rounds), size=(DRAWS - 1, len(rounds)))
    drawn = np.vstack([np.arange(len(rounds)), drawn])
    return np.median(np.array(rounds)[drawn], axis=1), np.mean(np.array(means)[drawn], axis=1), np.array(firsts)


def _own(counted: Sequence[_Counted], engine: str) -> list[Drafts]:
    """Results of the server's own drafts, cut to each number of tokens, from the tokens accepted at each position."""
    width = max((len(each.places) for each in counted), default=0)
    if engine not in ENGINES:
        return []
    places = np.array([np.pad(each.places, (0, width - len(each.places))) for each in counted])
    rounds, drafts, drafted = np.array([(each.rounds, *each.sums[:2]) for each in counted]).reshape(-1, 3).T
    method = Method(engine, "the drafts it has")
    return [
        Drafts(method, k, rounds + places[:, :k].sum(1), rounds, np.minimum(drafted, k * drafts))
        for k in range(1, width + 1)
    ]
