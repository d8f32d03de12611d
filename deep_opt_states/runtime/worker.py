"""Run the tasks of the CPU lane, or sections, on one thread in the order of their submission."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from perf_model.schedule.action import Lane

Task: TypeAlias = Callable[[], None]
Tasks: TypeAlias = "queue.SimpleQueue[tuple[Task, Future[None]] | None]"

EXIT_TIMEOUT_S = 3.0
"""The longest wait at exit for each lane, for sections and for an update; launchers kill a process after 10 s."""


class Worker:
    """A thread that ends with ``close`` or the last reference. It runs ``enter`` first, whose exception is raised."""

    # The threads of a ``ThreadPoolExecutor`` would keep the process alive if a task never ended.

    def __init__(self, enter: Task = lambda: None, name: str = "deep_opt_states-cpu-lane") -> None:
        tasks: Tasks = queue.SimpleQueue()
        entered: Future[None] = Future()
        tasks.put((enter, entered))
        thread = threading.Thread(target=_run, args=(tasks,), name=name, daemon=True)
        thread.start()
        self._tasks, self._thread = tasks, thread
        # Neither the thread nor the finalizer refers to the worker, so it can be collected, which ends the thread.
        self._finalizer = self.close = weakref.finalize(self, _end, tasks, thread)
        entered.result()

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, task: Task) -> Future[None]:
        """Enqueue ``task``, whose exception the future carries. If the thread was ended, the caller runs ``task``."""
        future: Future[None] = Future()
        if self._finalizer.alive:
            self._tasks.put((task, future))
        else:
            complete_future(future, task)
        return future


class HostThreads:
    """The threads of the lanes that the host runs: the worker, and two that read and write if units are on disk."""

    def __init__(self, enter: Task, *, uses_disk: bool) -> None:
        self._by_lane = {Lane.CPU: Worker(enter)}
        if uses_disk:
            self._by_lane |= {lane: Worker(enter, f"deep_opt_states-{lane.value}") for lane in (Lane.READ, Lane.WRITE)}

    def __getitem__(self, lane: Lane) -> Worker:
        """Return the thread of ``lane``; the worker, which issues the actions of other lanes, if it has none."""
        return self._by_lane[lane if lane.is_thread else Lane.CPU]

    def drain(self) -> None:
        """Block the host until the threads have run all that was submitted to them."""
        for thread in self._by_lane.values():
            thread.submit(lambda: None).exception()

    def close(self) -> None:
        for thread in self._by_lane.values():
            thread.close()


def complete_future(future: Future[None], task: Task) -> None:
    """Run ``task``, and set the result or the exception of ``future``."""
    try:
        task()
    except BaseException as error:  # noqa: BLE001
        future.set_exception(error)
    else:
        future.set_result(None)


def _end(tasks: Tasks, thread: threading.Thread) -> None:
    """End the thread after the submitted tasks, and wait for it, but not for a task that hangs."""
    tasks.put(None)
    # The finalizer may run on this thread, which cannot join itself: a task may hold the last reference.
    if thread is not threading.current_thread():
        thread.join(EXIT_TIMEOUT_S)


def _run(tasks: Tasks) -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        # A speculated step may be cancelled until it starts.
        if future.set_running_or_notify_cancel():
            complete_future(future, task)
        # The local variables would keep the tensors of the last task alive while get() blocks.
        del item, task, future
