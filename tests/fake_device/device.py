"""``FakeDevice``: the device interface over queues and blocks.

What is issued on a stream is only queued. It runs when the host waits for it, or unasked, in an order that the
``Timing`` chooses among those that streams and events permit. Everything runs on the thread that issues or waits, also
what the CPU lane is given, so that a run is a function of its timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, OneByOne, Part
from tests.fake_device.memory import Block
from tests.fake_device.queues import Lanes, Operation, Queue, Ready
from tests.fake_device.timing import Late, Timing


class FakeEvent:
    """Never recorded, it holds nobody back, as in CUDA."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._reached: Ready = lambda: True
        self._tick = 0

    def record_on(self, queue: Queue) -> None:
        def stamp() -> None:
            self._tick = self._lanes.ticks

        queue.add(stamp)
        self._reached = queue.mark()

    def reached(self) -> Ready:
        """Whether the work marked *by now* has finished; a later record does not change what is meant."""
        return self._reached

    def synchronize(self) -> None:
        self._lanes.run_until(self._reached)

    def finished(self) -> bool:
        return self._reached()

    def seconds_after(self, origin: FakeEvent) -> float:
        """Operations of the device between the two; its time has no other unit."""
        return float(self._tick - origin._tick)


class FakeStream:
    def __init__(self, device: FakeDevice, queue: Queue) -> None:
        self._device = device
        self.queue = queue

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
    """All memory is NaN until it is written. ``allocated_bytes`` counts device memory that is not freed."""

    shares_host_memory = False
    runs_when_issued = False

    def __init__(self, timing: Timing | None = None) -> None:
        self.lanes = Lanes(timing or Late())
        self.caller = FakeStream(self, self.lanes.caller)
        self.issuing = self.caller
        self._on_device: list[Block] = []
        self._pinned: list[Block] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(block.nbytes for block in self._on_device if not block.freed)

    def enter_thread(self) -> None:
        """There is one device, for the one thread that issues and runs everything."""

    def stream(self) -> FakeStream:
        return FakeStream(self, self.lanes.add_stream())

    def current_stream(self) -> FakeStream:
        return self.issuing

    def event(self) -> FakeEvent:
        return FakeEvent(self.lanes)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        block = Block(self.lanes, numel * dtype.itemsize, self.issuing.queue)
        self._on_device = [*(other for other in self._on_device if not other.freed), block]
        return block.hand_out(dtype)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        block = Block(self.lanes, numel * dtype.itemsize, None)
        self._pinned = [*(other for other in self._pinned if not other.freed), block]
        return block.hand_out(dtype)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """``cudaMemcpyAsync``: queued. A pageable source (host memory that is not from ``empty_host``) is staged now.

        With pageable memory it "might be synchronous" ("API synchronization behavior", CUDA runtime), or not: the host
        does not wait here. The conversion of another dtype happens on the device (PyTorch's ``Copy.cpp``), late, too.
        """
        if self._block(source) is None:
            source = source.clone()
        for tensor in (destination, source):
            block = self._block(tensor)
            if block in self._pinned:
                block.record(self.issuing.queue)
        target, origin = self._address_of(destination), self._address_of(source)
        self._issue(lambda: target.copy_(origin))

    def occupy(self, seconds: float) -> None:
        """Queue one operation that does nothing: how long the stream is busy is for the ``Timing`` to choose."""
        self._issue(lambda: None)

    def release_cached(self) -> None:
        """Do nothing: no memory is cached."""

    def launch(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        """Queue a kernel on the issuing stream; its tensors are in device or in pinned memory."""
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert self._block(argument) is not None, "illegal memory access: a kernel was given pageable memory"
        addresses = [self._address_of(it) if isinstance(it, torch.Tensor) else it for it in arguments]
        self._issue(lambda: kernel(*addresses))

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """``torch.Tensor.record_stream``: once freed, the memory is not reused before ``stream`` is done with it."""
        block = self._block(tensor)
        assert block is not None
        block.record(stream.queue)

    def _issue(self, operation: Operation) -> None:
        self.issuing.queue.add(operation)
        self.lanes.run_unasked()

    def _block(self, tensor: torch.Tensor) -> Block | None:
        """None for pageable memory."""
        blocks = (block for block in (*self._on_device, *self._pinned) if block.holds(tensor))
        return next(blocks, None)

    def _address_of(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._block(tensor)
        return tensor if block is None else block.address_of(tensor)


class LateAdam(OneByOne):
    """``kernel``, launched on the issuing stream."""

    def __init__(self, device: FakeDevice, kernel: AdamKernel) -> None:
        self._device = device
        self._kernel = kernel

    def zero(self, tensors: AdamTensors) -> None:
        self._kernel.zero(tensors)

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._kernel.begin_step(steps)

    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        names = [field.name for field in fields(tensors) if getattr(tensors, field.name) is not None]

        def update(*arguments: torch.Tensor) -> None:
            self._kernel.update(sub_group, replace(tensors, **dict(zip(names, arguments, strict=True))), part)

        self._device.launch(update, *(getattr(tensors, name) for name in names))

    def restart(self) -> None:
        self._kernel.restart()

    def close(self) -> None:
        self._kernel.close()
