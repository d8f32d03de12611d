"""Run tasks on one thread, in the order in which they were submitted: those of the CPU lane, and sections."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

Task: TypeAlias = Callable[[], None]
Tasks: TypeAlias = "queue.SimpleQueue[tuple[Task, Future[None]] | None]"

EXIT_TIMEOUT_S = 3.0
"""The most seconds to wait for each of an executor's two threads at exit, and likewise for an update that still runs.

A task that hangs must not delay the end of the process for long. The three waits together are shorter than the 10 s
that launchers wait before they kill a process.
"""


class CpuLane(Protocol):
    """The interface of the CPU lane that the executor submits its CPU steps to."""

    def submit(self, task: Task, /) -> Future[None]:
        """Enqueue ``task``. The returned future carries the task's exception, with its traceback."""

    def close(self) -> object:
        """End the lane after the tasks that have been submitted so far."""


class Worker:
    """A daemon thread called ``name``, by default the CPU lane.

    A ``ThreadPoolExecutor`` has no daemon threads, so a task that never ends would keep the process alive. ``enter`` is
    called on the thread before any task; the constructor waits for it and raises its exception. The thread ends with
    ``close``, with the last reference to the worker, or before the interpreter shuts down.
    """

    def __init__(self, enter: Task = lambda: None, name: str = "deep_opt_states-cpu-lane") -> None:
        tasks: Tasks = queue.SimpleQueue()
        entered: Future[None] = Future()
        tasks.put((enter, entered))
        thread = threading.Thread(target=_run, args=(tasks,), name=name, daemon=True)
        thread.start()
        self._tasks, self._thread = tasks, thread
        # Neither the thread nor the finalizer refers to the worker. If one did, the worker would never be collected,
        # and a worker that was not closed would keep its thread.
        self._finalizer = self.close = weakref.finalize(self, _end, tasks, thread)
        entered.result()

    @property
    def is_current_thread(self) -> bool:
        """Return whether a task of this worker is the caller."""
        return threading.current_thread() is self._thread

    def submit(self, task: Task) -> Future[None]:
        """Enqueue ``task``. The returned future carries the task's exception, with its traceback.

        If the thread was ended, as by the garbage collector before an engine ends its update, the caller runs the task.
        """
        future: Future[None] = Future()
        if self._finalizer.alive:
            self._tasks.put((task, future))
        else:
            complete_future(future, task)
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
