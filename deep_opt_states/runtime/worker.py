"""The CPU lane: one thread that runs tasks in the order they were submitted."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

Task: TypeAlias = Callable[[], None]
Tasks: TypeAlias = "queue.SimpleQueue[tuple[Task, Future[None]] | None]"

_EXIT_TIMEOUT_S = 4.0


class CpuLane(Protocol):
    def submit(self, task: Task, /) -> Future[None]:
        """The future carries the task's exception, with its traceback."""

    def close(self) -> object:
        """End after the tasks submitted so far."""


class Worker:
    """A daemon thread, unlike a ``ThreadPoolExecutor``'s: a task that never ends cannot keep the process alive.

    ``enter`` is called on the thread before any task, and the constructor raises what it raises. The thread ends with
    ``close``, with the last reference to the worker, or before the interpreter shuts down.
    """

    def __init__(self, enter: Task = lambda: None) -> None:
        tasks: Tasks = queue.SimpleQueue()
        entered: Future[None] = Future()
        tasks.put((enter, entered))
        thread = threading.Thread(target=_run, args=(tasks,), name="deep_opt_states-cpu-lane", daemon=True)
        thread.start()
        self._tasks = tasks
        self.close = weakref.finalize(self, _end, tasks, thread)
        entered.result()

    def submit(self, task: Task) -> Future[None]:
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future


def settle(future: Future[None], task: Task) -> None:
    """Run the task and give the future what came of it; whoever waits for the future raises its exception."""
    try:
        task()
    except BaseException as error:  # noqa: BLE001
        future.set_exception(error)
    else:
        future.set_result(None)


def _end(tasks: Tasks, thread: threading.Thread) -> None:
    """End the thread after the tasks submitted so far, and do not wait for one that hangs."""
    tasks.put(None)
    thread.join(_EXIT_TIMEOUT_S)


def _run(tasks: Tasks) -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        settle(future, task)
        # A blocked get() would keep the last task's tensors alive until the next step.
        del item, task, future
