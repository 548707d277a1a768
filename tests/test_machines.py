"""Standard output while work is shared out over a cluster, with a Ray that prints all it can. Its own slow tests are in
cli/test_ray_slow.py."""

import sys
from contextlib import closing
from threading import Thread
from types import SimpleNamespace

import pytest

from paceline.replay.cluster import LOCAL, spread


class Rows:
    """What Ray Data makes of items: results one after another, and a word from everybody before each."""

    def __init__(self, items):
        self.items = items

    def map(self, work, **_):
        self.work = work()
        return self

    def iter_rows(self):
        for item in self.items:
            say("(raylet) A worker died")
            yield self.work(item)


def say(text):
    """From this thread, and from one of Ray's."""
    print(f"{text}, here")
    thread = Thread(target=print, args=(f"{text}, in a thread",))
    thread.start()
    thread.join()


@pytest.fixture
def _ray(monkeypatch):
    ray = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda *_, **__: say("started"),
        shutdown=lambda: say("ended"),
        cluster_resources=lambda: {"CPU": 2},
    )
    context = SimpleNamespace(execution_options=SimpleNamespace())
    data = SimpleNamespace(
        ActorPoolStrategy=lambda **_: None,
        DataContext=SimpleNamespace(get_current=lambda: context),
        from_items=lambda items, **_: Rows(items),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)


class Doubling:
    def __call__(self, item):
        print("at work")
        return 2 * item


@pytest.mark.usefixtures("_ray")
def test_what_ray_prints_goes_to_standard_error(capsys):
    with closing(spread(Doubling, (), [1, 2, 3], LOCAL, None)) as results:
        found = [next(results), next(results)]
        say("(raylet) later")
    print(f"results {found}")
    told = capsys.readouterr()
    assert told.out == "results [2, 4]\n"
    for text in ("started", "(raylet) A worker died", "(raylet) later", "ended"):
        assert f"{text}, here\n" in told.err
        assert f"{text}, in a thread\n" in told.err
