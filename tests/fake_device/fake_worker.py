"""Emulate the CPU lane as a test double: a task runs when the host waits for it, or when the timing chooses its
lane."""

from __future__ import annotations

from concurrent.futures import Future

from deep_opt_states.runtime.worker import Task, complete_future
from tests.fake_device.device import FakeDevice
from tests.fake_device.queues import Ready


class FakeWorker:
    """A test double of ``Worker`` that runs its tasks on the fake device's CPU lane, without a thread."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def submit(self, task: Task, /) -> Future[None]:
        future = LateFuture(self._device)
        lanes = self._device.lanes
        lanes.cpu.add(lambda: complete_future(future, task) if future.set_running_or_notify_cancel() else None)
        future.task_has_run = lanes.cpu.mark()
        lanes.run_before_wait()
        return future

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class LateFuture(Future[None]):
    """A future whose ``result`` and ``exception`` run the device's operations until the task has run."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self.task_has_run: Ready = lambda: False

    def result(self, timeout: float | None = None) -> None:
        self._run()
        return super().result(timeout=0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run()
        return super().exception(timeout=0)

    def _run(self) -> None:
        self._device.lanes.run_until(self.task_has_run)
