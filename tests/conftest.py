"""Shared fixtures: optional data, and models made on the spot so that most tests need no weights."""

import gc
import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Tests run beside each other, and a thread pool larger than the free cores is ruinous. Before torch is imported, and
# in the environment, so that the commands some tests start do the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And where several threads are what is tested, those that wait leave the cores to others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import typer
from hypothesis import settings

from paceline import processor
from paceline.__main__ import GARBAGE
from tests import apart
from tests.paths import REPOSITORY, SHARED

# A shell starts what runs in its background with Ctrl-C ignored, and then no test would be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(*GARBAGE)
typer.main.get_command = cache(typer.main.get_command)  # which takes 20 ms, and most commands are asked often
settings.register_profile("shared", deadline=None)  # other processes may take the cores at any time
settings.load_profile("shared")
ssl.create_default_context = cache(ssl.create_default_context)  # 60 ms for every client, and none here speaks TLS


HAS_ENGINE = find_spec("torch") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs the engine where it is not installed (`make test PACKAGE=certify`)."""
    is_module = collection_path.suffix == ".py" and not HAS_ENGINE
    return True if is_module and apart.needs_engine(collection_path) else None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Half as many again as there are cores: many tests wait, for servers, times and other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(3 * cores // 2, 1)


def pytest_sessionstart(session: pytest.Session) -> None:
    """torch is imported where tests run; with several processes not in the one that hands them out, which they wait
    for."""
    runs = hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None)
    if runs and HAS_ENGINE:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _no_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks in tests do not wake the processor before every answer: their times mean nothing."""
    if HAS_ENGINE:
        from paceline.bench import runner

        monkeypatch.setattr(runner, "WAKE", 0.0)


@pytest.fixture(autouse=True)
def _no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters of engines in tests draft as much as they like: what pays hangs on clocks. `tests/test_budget.py` gives
    engines budgets."""
    if HAS_ENGINE:
        from paceline.draft.base import UNLIMITED
        from paceline.engine import engine

        real = engine.Budget
        monkeypatch.setattr(engine, "Budget", lambda *args: (real(*args), UNLIMITED)[1])


@pytest.fixture(params=processor.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Our kernels as on a processor of each level that this one has."""
    if request.param not in processor.levels():
        pytest.skip(f"this processor has no {request.param}")
    with processor.forced(request.param):
        yield request.param


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch with one thread, and with several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["", "library"], ids=["as here", "library"])
def products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Products as this processor makes them, and those of torch's library, as on a processor with AMX."""
    if request.param not in ("", *processor.levels()):
        pytest.skip("this processor has only the library")
    with processor.forced(request.param) if request.param else nullcontext():
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of optional test data (benchmark prompts, small public models); set PACELINE_SHARED to yours."""
    if not SHARED.is_dir():
        pytest.skip(f"optional data not found at {SHARED}; set PACELINE_SHARED")
    return SHARED


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """stories260K: a real trained Llama of 260,032 parameters."""
    path = shared / "models" / "stories260K"
    if not path.is_dir():
        pytest.skip(f"{path} not found; set PACELINE_SHARED")
    return path


@pytest.fixture(scope="session")
def demo() -> Path:
    """The embedded demo model."""
    path = REPOSITORY / "models" / "demo"
    if not (path / "model.safetensors").exists():
        pytest.skip("models/demo has not been trained yet")
    return path


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer alone, chat template and all."""
    from tests import models

    folder = tmp_path_factory.mktemp("tokenizer")
    models.tokenizer().save_pretrained(folder)
    return folder
