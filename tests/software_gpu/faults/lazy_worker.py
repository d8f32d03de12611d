"""Let the worker of the cpu lane be as late as it may be: it runs a task when the host waits for the task."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from deep_opt_states.runtime import executor
from deep_opt_states.runtime.worker import Task, Worker


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
