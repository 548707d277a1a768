"""A backend that answers from a function, and small builders of what tests of alignment need."""

from paceline.evals.align.methods import Setting, Task, read_methods
from paceline.evals.align.options import Decoding
from paceline.evals.align.types import Call, Item, Rule, Scenario
from paceline.net.completion import Completion


class Scribe:
    """Answers by `say(request, number)`, number from 1, and keeps every request. A tuple is (text, finish_reason)."""

    label, opened = "scribe", False

    def __init__(self, say):
        self._say = say
        self.requests = []

    async def complete(self, request):
        self.requests.append(request)
        said = self._say(request, len(self.requests))
        text, reason = said if isinstance(said, tuple) else (said, "stop")
        words = len(text.split())
        prompt = sum(len(m["content"].split()) for m in request.messages) + len(request.prefix.split())
        call = Call(request.phase, reason, 0.0, prompt, 0, len(request.forced.split()), words)
        return Completion(text, finish_reason=reason), call

    async def close(self): ...


def scenario(safety=3, behavioral=3):
    """A scenario with so many rules, each with a text of its own."""
    return Scenario(
        "Test", "Test", "A test.",
        tuple(Rule("safety", i, f"safety rule {i}.") for i in range(1, safety + 1)),
        tuple(Rule("behavioral", i, f"behavioral rule {i}.") for i in range(1, behavioral + 1)),
    )  # fmt: skip


def item(**changes):
    """A safe item without a reference answer."""
    told = {
        "id": "Test/000", "scenario": "Test", "prompt": "plain?", "adversarial_prompt": "disguised?", "label": "safe",
    }  # fmt: skip
    return Item(**(told | changes))


async def complete(backend, request):
    """The completion, with its cost as `call`."""
    completion, completion.call = await backend.complete(request)
    return completion


async def answer(method, say, **settings):
    """What a method makes of an item with a scribe, and what it asked for."""
    scorer = settings.pop("scorer", None)
    scribe = Scribe(say)
    task = Task(item(), scenario(), scribe, Setting(Decoding(100), **settings), "scope", scorer)
    (one,) = read_methods(method)
    return await one(task), scribe.requests
