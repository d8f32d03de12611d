"""Run the tasks of the CPU lane on one thread, in the order in which they were submitted."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

Task: TypeAlias = Callable[[], None]
Tasks: TypeAlias = "queue.SimpleQueue[tuple[Task, Future[None]] | None]"

EXIT_TIMEOUT_S = 4.0
"""The most seconds to wait for the lane's thread at exit, and likewise for an update that still runs.

A task that hangs must not delay the end of the process for long. Both waits together are shorter than the 10 s that
launchers wait before they kill a process.
"""


class CpuLane(Protocol):
    """The interface of the CPU lane that the executor submits its CPU steps to."""

    def submit(self, task: Task, /) -> Future[None]:
        """Enqueue ``task``. The returned future carries the task's exception, with its traceback."""

    def close(self) -> object:
        """End the lane after the tasks that have been submitted so far."""


class Worker:
    """The CPU lane on a daemon thread.

    A ``ThreadPoolExecutor`` has no daemon threads, so a task that never ends would keep the process alive.

    ``enter`` is called on the thread before any task; the constructor waits for it and raises its exception. The thread
    ends when ``close`` is called, when the last reference to the worker is gone, or before the interpreter shuts down.
    """

    def __init__(self, enter: Task = lambda: None) -> None:
        tasks: Tasks = queue.SimpleQueue()
        entered: Future[None] = Future()
        tasks.put((enter, entered))
        thread = threading.Thread(target=_run, args=(tasks,), name="deep_opt_states-cpu-lane", daemon=True)
        thread.start()
        self._tasks = tasks
        # Neither the thread nor the finalizer refers to the worker. If one did, the worker would never be collected,
        # and a worker that was not closed would keep its thread.
        self.close = weakref.finalize(self, _end, tasks, thread)
        entered.result()

    def submit(self, task: Task) -> Future[None]:
        """Enqueue ``task``. The returned future carries the task's exception, with its traceback."""
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future


def complete_future(future: Future[None], task: Task) -> None:
    """Run ``task``, and set the result or the exception of ``future``, which its waiters receive."""
    try:
        task()
    except BaseException as error:  # noqa: BLE001
        future.set_exception(error)
    else:
        future.set_result(None)


def _end(tasks: Tasks, thread: threading.Thread) -> None:
    """End the thread after the tasks submitted so far, and wait for it, but not for a task that hangs."""
    tasks.put(None)
    # If a task has the last reference to the worker, the finalizer runs on the thread, which cannot join itself.
    if thread is not threading.current_thread():
        thread.join(EXIT_TIMEOUT_S)


def _run(tasks: Tasks) -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        complete_future(future, task)
        # Without this, the local variables would keep the last task's tensors alive while get() blocks, until the next
        # step.
        del item, task, future
