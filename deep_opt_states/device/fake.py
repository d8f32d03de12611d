"""A device whose work happens late: CUDA's semantics on the CPU, for finding races without a GPU.

What is issued on a stream is only queued. It runs when the host waits for an event, in the most hostile order that
streams and events permit: lanes are served by strict priority, so whatever is not held back by a wait overtakes.
Everything runs on the thread that waits, also what the CPU lane is given, so a run is a function of its priorities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep

Operation = Callable[[], object]


class Deadlock(AssertionError):
    """Something waits for what nothing can finish."""


class Queue:
    """Operations in order. ``issued`` and ``finished`` count them; a wait is an operation that may not be ready."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.issued = 0
        self.finished = 0
        self._operations: deque[tuple[Callable[[], bool], Operation]] = deque()

    def add(self, operation: Operation, ready: Callable[[], bool] = lambda: True) -> int:
        """The number that ``finished`` reaches when the operation has run."""
        self._operations.append((ready, operation))
        self.issued += 1
        return self.issued

    def run_one(self) -> bool:
        """Whether the next operation was ready, and has run."""
        if not self._operations or not self._operations[0][0]():
            return False
        _, operation = self._operations.popleft()
        operation()
        self.finished += 1
        self.device.ticks += 1
        return True


class FakeEvent:
    """Never recorded, it holds nobody back, as in CUDA."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._queue: Queue | None = None
        self._mark = 0
        self._tick = 0

    def record_on(self, queue: Queue) -> None:
        def stamp() -> None:
            self._tick = self._device.ticks

        self._queue, self._mark = queue, queue.add(stamp)

    def reached(self) -> Callable[[], bool]:
        """Whether the work marked *by now* has finished; a later record does not change the answer's meaning."""
        queue, mark = self._queue, self._mark
        return lambda: queue is None or queue.finished >= mark

    def synchronize(self) -> None:
        self._device.run_until(self.reached())

    def seconds_after(self, origin: FakeEvent) -> float:
        """Operations of the device between the two; its time has no other unit."""
        return float(self._tick - origin._tick)


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.queue = Queue(device)

    def record(self, event: FakeEvent) -> None:
        event.record_on(self.queue)

    def wait(self, event: FakeEvent) -> None:
        self.queue.add(lambda: None, event.reached())

    @contextmanager
    def issue(self) -> Iterator[None]:
        previous, self._device.issuing = self._device.issuing, self
        try:
            yield
        finally:
            self._device.issuing = previous


class FakeDevice:
    """``priorities`` orders the lanes: streams in the order of their creation, and the CPU lane as the last number.

    Slots are NaN until they are written. Host memory that is not from ``empty_host`` is pageable, and a copy that
    touches it blocks the host, as CUDA's does.
    """

    def __init__(self, priorities: Sequence[int] = ()) -> None:
        self.ticks = 0
        self.cpu = Queue(self)
        self.caller = FakeStream(self)
        self.issuing = self.caller
        self._streams: list[FakeStream] = []
        self._priorities = list(priorities)
        self._pinned: list[torch.Tensor] = []
        self._on_device: list[torch.Tensor] = []

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def current_stream(self) -> FakeStream:
        return self.caller

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._on_device.append(torch.full((numel,), torch.nan, dtype=dtype))
        return self._on_device[-1]

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._pinned.append(torch.empty(numel, dtype=dtype))
        return self._pinned[-1]

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(lambda: destination.copy_(source))
        if self._is_pageable(destination) or self._is_pageable(source):
            self.run_until_idle(self.issuing.queue)

    def launch(self, operation: Callable[[], Any]) -> None:
        """Queue an operation on the issuing stream."""
        self.issuing.queue.add(operation)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let the device work, the most urgent lane first, until ``done``. Raises ``Deadlock``."""
        while not done():
            if not any(queue.run_one() for queue in self._by_priority()):
                raise Deadlock("the host waits for work that nothing can finish")

    def run_until_idle(self, queue: Queue) -> None:
        mark = queue.issued
        self.run_until(lambda: queue.finished >= mark)

    def _by_priority(self) -> list[Queue]:
        queues = [*(stream.queue for stream in self._streams), self.cpu]
        order = [queues[number] for number in self._priorities] if self._priorities else queues
        # What the caller had issued before the step is the last to finish.
        return [*order, self.caller.queue]

    def _is_pageable(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        known = (*self._pinned, *self._on_device)
        return all(storage != other.untyped_storage().data_ptr() for other in known)


class LateAdam:
    """``kernel``, launched on the issuing stream."""

    def __init__(self, device: FakeDevice, kernel: AdamKernel) -> None:
        self._device = device
        self._kernel = kernel

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._kernel.begin_step(steps)

    def update(self, *arguments: Any) -> None:
        self._device.launch(lambda: self._kernel.update(*arguments))
