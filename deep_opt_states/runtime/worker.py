"""The CPU lane: one thread that runs tasks in the order they were submitted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

Task = Callable[[], None]


class Worker:
    """A daemon thread, unlike a ``ThreadPoolExecutor``'s: a task that never ends cannot keep the process alive."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Task, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deep_opt_states-cpu-lane", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> Future[None]:
        """The future carries the task's exception, with its traceback."""
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """End the thread after the tasks submitted so far."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                task()
            except BaseException as error:  # noqa: BLE001 (the thread that waits for the future raises it)
                future.set_exception(error)
            else:
                future.set_result(None)
            # A blocked get() would keep the last task's tensors alive until the next step.
            del item, task, future
