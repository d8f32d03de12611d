"""The CPU lane of the fake device: a task runs when somebody waits for it, or when the device lets its lane work."""

from __future__ import annotations

from concurrent.futures import Future

from deep_opt_states.runtime.worker import Task, settle
from tests.fake_device.device import FakeDevice
from tests.fake_device.queues import Ready


class FakeWorker:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def submit(self, task: Task, /) -> Future[None]:
        future = _LateFuture(self._device)
        lanes = self._device.lanes
        lanes.cpu.add(lambda: settle(future, task))
        future.settled = lanes.cpu.mark()
        lanes.run_unasked()
        return future

    def close(self) -> None:
        """There is no thread to end."""


class _LateFuture(Future[None]):
    """Asking for its result or its exception lets the device work until the task has run."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self.settled: Ready = lambda: False

    def result(self, timeout: float | None = None) -> None:
        self._run()
        return super().result(timeout=0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run()
        return super().exception(timeout=0)

    def _run(self) -> None:
        self._device.lanes.run_until(self.settled)
