"""List the ways in which the device and the worker may behave, and in which different missing waits show.

With the lazy ones, the order of events does not depend on the speed of this machine: a task for which nothing waits
is later than everything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from deep_opt_states.runtime import executor
from deep_opt_states.runtime.worker import Task, Worker
from tests.software_gpu import settings
from tests.software_gpu.settings import Settings

LAZY_S = 20.0
"""Longer than any of these runs takes, also on a busy machine. Ranks that run the same program do not need progress."""

LAZY, LAZY_WORKER = "lazy", "lazy worker"
LAZY_SIDE_STREAMS = "lazy side streams"
LAZY_TO_HOST = "lazy kernels and copies to the host"


class LazyWorker(Worker):
    """The real worker, whose tasks run when something waits for them or for a later task, and not before."""

    def __init__(self, enter: Task = lambda: None) -> None:
        self._demanded: list[threading.Event] = []
        super().__init__(enter)
        self.close = _after(self._demanded, self.close)  # type: ignore[assignment]

    def submit(self, task: Task) -> Future[None]:
        demanded = threading.Event()
        self._demanded.append(demanded)

        def run_on_demand() -> None:
            demanded.wait()
            task()

        future = super().submit(run_on_demand)
        future.result = _after(list(self._demanded), future.result)  # type: ignore[method-assign]
        future.exception = _after(list(self._demanded), future.exception)  # type: ignore[method-assign]
        return future


def _after(demanded: list[threading.Event], wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``wait``, which first sets all events that are in the list then."""

    def demand_and_wait(*args: Any) -> Any:
        for event in demanded:
            event.set()
        demanded.clear()
        return wait(*args)

    return demand_and_wait


def lazy_worker() -> AbstractContextManager[object]:
    """Return a context in which every executor has such a worker."""
    return mock.patch.object(executor, "Worker", LazyWorker)


ADVERSARIES: dict[str, tuple[Settings, Callable[[], AbstractContextManager[object]]]] = {
    **{name: (found, nullcontext) for name, found in settings.ADVERSARIES.items()},
    LAZY: (Settings(lazy=True, lazy_s=LAZY_S), nullcontext),
    LAZY_WORKER: (Settings(), lazy_worker),
    # Tasks of the default stream are not late, so that they overtake those of the other streams.
    LAZY_SIDE_STREAMS: (Settings(lazy=True, lazy_s=LAZY_S, eager="on default stream"), nullcontext),
    # Prefetches overtake flushes.
    LAZY_TO_HOST: (Settings(lazy=True, lazy_s=LAZY_S, eager="copies to the device"), nullcontext),
}
"""The settings of the device by name, and a context in which the host behaves in a certain way, too."""
