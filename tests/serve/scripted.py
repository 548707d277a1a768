"""`paceline serve` whose answers a script forces, for clients in processes of their own.

SCRIPT is a JSON file with the answers, one a turn, and `hold`, seconds that the first round takes. SCRIPT_LOG gets a
line for every request that ended, and for every reply with a status of 400 or more."""

import json
import os
import sys
from pathlib import Path
from time import sleep
from types import SimpleNamespace

from paceline import cli
from paceline.serve import routes
from paceline.serve.chats import Chats
from paceline.serve.metrics import Metrics
from tests.serve.live import spelled

SCRIPT = json.loads(Path(os.environ["SCRIPT"]).read_text())
SIDE = "A title"
"""The answer to requests beside the conversation, such as for a title: those have no tools where the script calls."""

SAID = []


def answer(request):
    """The next answer; the script goes on where one has ended, and not where a client gave up."""
    if any("<tool_call>" in one for one in SCRIPT["answers"]) and not request.tools:
        return SIDE
    return next(iter(SCRIPT["answers"][len(SAID) :]), SIDE)


def note(**facts):
    with open(os.environ["SCRIPT_LOG"], "a") as log:
        log.write(json.dumps(facts) + "\n")


def submit(chats, request, *rest, real=Chats.submit):
    submitted = real(chats, request, *rest)
    for job in submitted[0]:
        job.answer = answer(request)
        job.tools = [one.function.name for one in request.tools or []]
    return submitted


def ended(metrics, job, real=Metrics.end):
    real(metrics, job)
    facts = {"prompt": job.row.prompt_length, "reused": job.row.reused, "finish": job.row.finish_reason or "abort"}
    if facts["finish"] == "stop" and job.answer != SIDE:
        SAID.append(job.answer)
    note(answer=job.answer, tools=job.tools, **facts)


def app(worker, *rest, real=routes.create_app):
    made, step, rounds = real(worker, *rest), worker.engine.step, []

    def slowly():
        if not rounds:
            rounds.append(sleep(SCRIPT["hold"]))
        return step()

    worker.engine.step = slowly

    async def watched(scope, receive, send):
        async def sent(message):
            if message["type"] == "http.response.start" and message["status"] >= 400:
                note(refused=message["status"], path=scope["path"], method=scope["method"])
            await send(message)

        await made(scope, receive, sent)

    return watched


Chats.grammar = lambda chats, request, *_: SimpleNamespace(allowed=spelled(chats.grammars, answer(request)).allowed)
Chats.submit, Metrics.end, routes.create_app = submit, ended, app
if __name__ == "__main__":
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
