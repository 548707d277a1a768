"""`paceline watch`: what the drafts of a running server bring now, and what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.parameters import with_options
from paceline.cli.show import say
from paceline.draft.spec import option
from paceline.errors import PacelineError, printable
from paceline.interrupt import Interrupt
from paceline.net.keys import Keys, check_server
from paceline.runs.runs import rows

if TYPE_CHECKING:
    from paceline.net.servers import Drafting
    from paceline.replay.advice import Costs

TOKEN_COST = 0.05  # If nothing was measured, a drafted token is assumed to cost this share of a round.
LEAST_DRAFTS = 50  # With fewer drafts nothing is advised.
EVEN = 0.9  # In chains of one length, neither mean tokens nor counted positions are below this share of the other.
ANSWER = 128  # Most tokens of an answer to --ask.
WORTH_IT = 1.02  # A change is advised if it raises the gain by this factor.


@with_options
def watch(
    url: Annotated[str, typer.Argument(help="The server's address, with or without /v1.", metavar="URL[#model]")],
    every: float = option(10.0, "Seconds between two readings.", least=0.1),
    once: bool = option(
        False, "Read the counters once, and show everything since the server started.", names=("--once",)
    ),
    tuned: Path | None = option(
        None, "Folder that `paceline tune server` wrote; it says what drafted tokens cost at each load."
    ),
    token_cost: float = option(
        TOKEN_COST, "Cost of a drafted token as a share of a plain round, if there is no --tuned.", least=0
    ),
    ask: str | None = option(
        None, "Prompt to send at each reading, whose answer reports its own drafts, instead of reading /metrics."
    ),
    keys: Keys = Keys(),
    as_json: bool = option(False, "Print each reading as a JSON object on a line of its own.", names=("--json",)),
) -> int:
    """Read /metrics of a server (vLLM, SGLang, llama.cpp or ours) and say what its drafts bring.

    Each reading shows how often the drafted token at each position was accepted, whether drafts pay at the cost of a
    drafted token, and which number of drafted tokens would pay best. Start SGLang with --enable-metrics and llama.cpp
    with --metrics. SGLang reports only the mean number of tokens. If a reading fails, standard error says so, and the
    next reading counts from the last one that worked.
    --ask reads one answer at a time instead, of any server whose answers report their drafts: vLLM's with
    --per-request-spec-decode-metrics, SGLang's, llama.cpp's, TensorRT-LLM's, ours.

    \b
    paceline watch http://127.0.0.1:8000
    paceline watch http://127.0.0.1:8000 --tuned tuned --json
    """
    check_server(url, keys)
    from paceline.net.servers import Drafting
    from paceline.replay.advice import Costs

    costs = _costs(tuned) if tuned is not None else Costs.assumed(token_cost)
    key = keys.of(url)

    def read() -> Drafting:
        if ask is not None:
            return _of_answer(url, keys, ask)
        now = Drafting.read(url, key)
        if now is None:
            raise PacelineError(f"{url} has no /metrics; SGLang needs --enable-metrics, llama.cpp --metrics")
        return now

    def show(facts: dict[str, Any]) -> None:
        print(json.dumps(facts) if as_json else _in_words(facts), flush=True)

    before, began = read(), monotonic()
    if once:
        show(reading(before, costs))
        return 0
    with Interrupt() as interrupt:
        due = began + every
        while not interrupt.pressed:
            if monotonic() < due:
                sleep(0.1)
                continue
            due = monotonic() + every
            try:
                now = read()
            except PacelineError as error:
                say(f"{printable(error)}; trying again in {every:g} s", err=True)
                continue
            show(reading(now, costs) if ask is not None else reading(now.since(before), costs, monotonic() - began))
            before, began = now, monotonic()
    return 0


def _of_answer(url: str, keys: Keys, ask: str) -> Drafting:
    """Ask one request, and return its answer's counts of drafts. Raises PacelineError if it has none."""
    from paceline.net.servers import Drafting, Request, Server

    server = Server.find(url, keys)
    more = {"return_meta_info": True} if server.engine == "sglang" else {}
    body = server.body(Request("watch", [{"role": "user", "content": ask}]), ANSWER, stream=False, **more)
    del body["stream_options"]
    answers = server.send([body])
    if isinstance(answers[0], PacelineError):
        raise answers[0]
    if (drafting := Drafting.of_answers(answers)) is None:
        needs = "vLLM needs --per-request-spec-decode-metrics summary"
        raise PacelineError(f"an answer of {url} tells nothing of its drafts; {needs}")
    return replace(drafting, engine=server.engine, running=1.0)


def _costs(tuned: Path) -> Costs:
    """What `paceline tune server` measured."""
    from paceline.replay.advice import CONFIGURATION

    if not (tuned / CONFIGURATION).is_file():
        raise PacelineError(f"{tuned} is no folder of `paceline tune server` that has finished")
    from paceline.replay.server import VISITS, costs_of

    return costs_of([*rows(tuned / VISITS)], "")[0]


def reading(new: Drafting, costs: Costs, seconds: float | None = None) -> dict[str, Any]:
    """Facts of a reading. new: counts since the reading before; seconds: time between the two."""
    at, positions = costs.place(new.running), len(new.survival)
    drafted = new.drafted / new.drafts if new.drafts else 0.0
    gains = costs.gains(at, new.survival, drafted)
    cost = round(costs.relative(at, 1.0) - 1, 4)
    uneven = ""
    if drafted < EVEN * positions:
        uneven = f"they vary in length ({drafted:.1f} tokens)"
    elif positions < EVEN * drafted:
        uneven = f"they have {drafted:.1f} tokens, none accepted behind position {positions} (trees, or useless ends)"
    return {
        "engine": new.engine,
        "running": new.running,
        "tokens_per_second": round(new.tokens / seconds, 1) if seconds else None,
        "drafts": new.drafts,
        "drafted": new.drafted,
        "accepted": new.accepted,
        "by_drafter": {name: {"drafted": of[0], "accepted": of[1]} for name, of in new.by_drafter.items()},
        "accepted_by_position": [round(share, 4) for share in new.survival],
        "tokens_a_round": new.round_tokens,
        "token_cost": cost,
        "gain": round(gains[-1], 4) if new.survival else None,
        "advice": _advice(new, gains, cost, uneven),
    }


def _advice(new: Drafting, gains: Sequence[float], cost: float, uneven: str) -> str:
    """Advise in words. gains: over plain decoding, by the largest number of drafted tokens; uneven: why drafts are no
    chains of one length. Then undrafted positions count as rejected, and no position can be judged."""
    from paceline.replay.advice import ENGINES

    best, known = max(range(len(gains)), key=gains.__getitem__), ENGINES.get(new.engine, {})
    if new.round_tokens is None:
        return "there were no drafts"
    if not new.drafts or (new.accepted and not new.survival):
        return f"{new.round_tokens:.2f} tokens a round; the server does not tell them by position"
    if new.drafts < LEAST_DRAFTS:
        return f"{new.drafts:.0f} drafts are too few to say"
    if uneven:
        pay = "pay" if gains[-1] > 1 else "do not pay"
        return f"drafts {pay} as a whole; {uneven}, so no position can be judged"
    if best == 0:
        return f"drafts do not pay now: {known.get('off', 'turn them off')}"
    if gains[best] > WORTH_IT * gains[-1]:
        change = known.get("own", "draft {k} tokens").format(k=best, more=best + 1)
        return f"tokens after position {best} do not pay now: {change}"
    more = new.survival[-1] > 2 * cost * gains[-1]
    return "drafts pay at every position" + ("; more tokens may pay too" if more else "")


def _in_words(facts: dict[str, Any]) -> str:
    parts = [f"{facts['engine'] or 'server'}: {facts['running']:.0f} running"]
    parts += [f"{facts['tokens_per_second']} tokens/s"] if facts["tokens_per_second"] is not None else []
    if facts["drafts"]:
        every = [("", facts), *((f"{name} ", of) for name, of in facts["by_drafter"].items() if of["drafted"])]
        parts += [f"{facts['drafts']:.0f} drafts"]
        parts += [f"{who}{of['accepted']:.0f} of {of['drafted']:.0f} accepted" for who, of in every]
    places = " ".join(f"{share:.0%}" for share in facts["accepted_by_position"])
    parts += [f"accepted by position {places}"] if places else []
    cost = f"{facts['token_cost']:.1%} of a round"
    gain = "" if facts["gain"] is None else f"gain {facts['gain']:.2f} if a drafted token costs {cost}; "
    return f"{', '.join(parts)}\n  {gain}{facts['advice']}"
