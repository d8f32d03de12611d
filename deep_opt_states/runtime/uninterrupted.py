"""Run code to its end where no signal handler can interrupt it, and let the wait for it be repeated.

Python runs signal handlers on the main thread, between any two instructions, and they may raise. Nothing shows whether
an interrupted line has launched its kernel. So code that changes an update, a *section*, runs on a thread of its own.
An interrupt ends only the caller's wait: the section runs to its end, and the next call waits for it first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.runtime.worker import Worker

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

THREAD_NAME = "deep_opt_states-sections"


def section(method: Callable[Concatenate[Any, Arguments], Value]) -> Callable[Concatenate[Any, Arguments], Value]:
    """Wrap ``method`` of an executor so that it runs to its end even if a signal handler raises in the caller."""

    @wraps(method)
    def run(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        result: Value = self.run_uninterrupted(lambda: method(self, *args, **kwargs))
        return result

    return run


class Uninterrupted:
    """The thread for the sections of the main thread; other threads and forked processes run sections themselves."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self._worker = Worker(device.enter_thread, THREAD_NAME)
        self._process: int | None = os.getpid()
        self._is_settled = True
        """False while the main thread waits for a section, and after an interrupt of this wait."""

    def run(self, task: Callable[[], Value]) -> Value:
        """Run ``task`` as a section on the caller's current stream, and return its result or raise its exception."""
        # If a signal handler raises, the section never starts, or runs to its end, and its result or exception is lost.
        self.settle()
        if threading.current_thread() is not threading.main_thread() or not self._has_thread:
            return task()
        submitted = Section(task, self._device.current_stream())
        self._is_settled = False
        self._worker.submit(submitted)
        # Again: a signal handler may have called ``run`` since, which sets it to true.
        self._is_settled = False
        submitted.wait_for_end()
        self._is_settled = True
        return submitted.outcome()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait for a section whose caller was interrupted, and return whether it has ended in time."""
        if self._is_settled or self._worker.is_current_thread or not self._has_thread:
            return True
        # Submit a section: the interrupt may have come before the caller knew that its own was submitted.
        last = Section(lambda: None, self._device.current_stream())
        self._worker.submit(last)
        self._is_settled = last.wait_for_end(timeout_s)
        return self._is_settled

    def close(self) -> None:
        """End the thread. The callers run all later sections."""
        self._worker.close()
        self._process = None

    @property
    def _has_thread(self) -> bool:
        """Return whether this process has the thread. In Python 3.11, an interrupt breaks ``Thread.is_alive``."""
        return os.getpid() == self._process


class Section(Generic[Value]):
    """One section, with its end and its outcome."""

    # An interrupt can leave the lock of a ``threading.Event`` or ``Future`` acquired for ever, so neither is used.

    def __init__(self, run: Callable[[], Value], stream: Stream[Any]) -> None:
        self._run = run
        self._stream = stream
        self._value: Value
        self._error: BaseException | None = None
        self._has_ended = False
        self._end = threading.Lock()
        self._end.acquire()

    def __call__(self) -> None:
        try:
            with self._stream.issue():
                self._value = self._run()
        except BaseException as error:  # noqa: BLE001 (``outcome`` raises it)
            self._error = error
        self._has_ended = True
        self._end.release()

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Block the host until the section has ended, for at most ``timeout_s``. Return whether it has ended."""
        # The lock alone does not show the end: an interrupt may come as soon as it is acquired.
        if not self._has_ended:
            self._end.acquire(timeout=-1 if timeout_s is None else timeout_s)
        return self._has_ended

    def outcome(self) -> Value:
        """Return the result of the section that has ended, or raise its exception."""
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            # Break the cycle of error, traceback and frame, which would keep the memory that the section used.
            del error
