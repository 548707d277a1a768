"""Pauses between attempts; what servers do is in tests/evals/test_endpoint.py."""

import asyncio

import pytest

from paceline.workbench import client
from paceline.workbench.client import CompletionError, Retry


def test_pauses_grow_and_are_no_shorter_than_the_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def attempt(number: int) -> None:
        raise client._Passing("busy", after={2: 0.25, 3: 9.0}.get(number, 0.0))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(client, "uniform", lambda low, high: high)
    with pytest.raises(CompletionError, match="busy; given up after 5 tries"):
        asyncio.run(Retry(tries=5, base=0.5, longest=1.5).run(attempt))
    assert pauses == [0.5, 1.0 + 0.25, 1.5 + 1.5, 1.5]
