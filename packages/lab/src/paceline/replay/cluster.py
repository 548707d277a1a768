"""Spread work over the machines of a Ray cluster, through Ray Data, whatever the work is.

A worker that dies is started again with its item. Ray is imported when there is work (extra `ray`). Until the end,
standard output goes to standard error, because Ray and its threads print at any time."""

import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

AUTO, LOCAL = "auto", "local"
"""Addresses: the cluster of RAY_ADDRESS or of this machine, else a new one here; a new one here."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
PATIENCE_SECONDS = 10.0  # Time for a cluster's head to answer.
Work = Callable[[Any], Any]


class _Worker:
    """A process of the cluster. Rows carry the work with them, because Ray warns of constructor arguments."""

    work: Work | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Do a row's work. Returns a PacelineError as its result, because Ray would retry and print a long trace."""
        folder, make, options, item = pickle.loads(row["item"])
        try:
            if self.work is None:
                if Path(folder).is_dir():
                    os.chdir(folder)  # Relative paths must mean the same here.
                self.work = make(*options)
            result = self.work(item)
        except PacelineError as error:
            result = error
        return {"result": pickle.dumps(result)}


def spread(
    make: Callable[..., Work], options: Sequence[Any], items: Sequence[Any], address: str, workers: int | None
) -> Generator[Any]:
    """Yield `make(*options)(item)` for each of the items, one or more, in order. `make` is called once in each worker.

    Until the generator is closed, standard output goes to standard error.

    address  AUTO, LOCAL, or an address of Ray. workers: processes, at most one a core; None: one for every core.

    Raises PacelineError if a worker raises it, or if there is no cluster at the address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # A cluster started here sends no statistics.
    import ray
    from ray.data import ActorPoolStrategy, DataContext, from_items

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # Errors are raised anyway.
    with redirect_stdout(sys.stderr), _cluster(address, workers):
        cores = int(ray.cluster_resources().get("CPU", 1))
        size = min(workers or cores, cores, len(items))
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        packed = [{"item": pickle.dumps((os.getcwd(), make, options, item))} for item in items]
        rows = from_items(packed, override_num_blocks=len(items))
        for row in rows.map(_Worker, compute=ActorPoolStrategy(size=size), num_cpus=1).iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, PacelineError):
                raise result
            yield result


@contextmanager
def _cluster(address: str, workers: int | None) -> Generator[None]:
    """Context in which this process is connected to the cluster.
    An earlier connection stays; a new cluster ends with it."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        if address == AUTO:
            with suppress(ConnectionError):
                ray.init(AUTO, **QUIET)
        elif address != LOCAL:
            _knock(address)
            ray.init(address, **QUIET)
        if not ray.is_initialized():
            ray.init(LOCAL, num_cpus=workers, include_dashboard=False, **QUIET)
    except (OSError, ValueError, RuntimeError) as error:
        raise PacelineError(f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError if nobody listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), PATIENCE_SECONDS).close()
