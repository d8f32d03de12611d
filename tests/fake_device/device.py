"""Implement the device interface as a test double, with queues and allocations that need no GPU.

An operation that is issued on a stream is only queued. It runs when the host waits for it, or earlier if the ``Timing``
lets it. The ``Timing`` also chooses the order, among the orders that streams and events permit. All operations,
including the tasks of the CPU lane, run on the thread that issues or waits, so that a run is a function of its timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, ElementRange
from deep_opt_states.device.slab import HostSlab
from tests.fake_device.fake_memory import Allocation
from tests.fake_device.queues import Lanes, Operation, Queue, Ready
from tests.fake_device.timing import Late, Timing


class FakeEvent:
    """A test double of a CUDA event. As in CUDA, an event that was never recorded makes nothing wait."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._reached: Ready = lambda: True
        self._tick = 0

    def record_on(self, queue: Queue) -> None:
        """Record the event on ``queue``, behind the operations issued so far."""

        def stamp() -> None:
            self._tick = self._lanes.ticks

        queue.add(stamp)
        self._reached = queue.mark()

    def reached(self) -> Ready:
        """Return a function that returns whether the work marked *by now* has finished.

        A later record does not change its result.
        """
        return self._reached

    def synchronize(self) -> None:
        self._lanes.run_until(self._reached)

    def finished(self) -> bool:
        return self._reached()

    def seconds_after(self, origin: FakeEvent) -> float:
        """Return the number of operations between the two events: the fake device's unit of time, in place of
        seconds."""
        return float(self._tick - origin._tick)


class FakeStream:
    """A test double of a CUDA stream, over one queue."""

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


class FakeSlab(HostSlab):
    """A test double of the slab, over page-locked ``memory``, which is zeroed."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(0)
        self._pinned: torch.Tensor | None = memory.zero_()

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._pinned is not None
        return self._pinned.narrow(0, offset_bytes, numel * dtype.itemsize).view(dtype)

    def close(self) -> None:
        self._pinned = None


class FakeDevice:
    """A test double of a GPU. All memory is NaN until it is written.

    ``allocated_bytes`` counts device memory that has not been freed.
    """

    shares_host_memory = False
    runs_when_issued = False

    def __init__(self, timing: Timing | None = None) -> None:
        self.lanes = Lanes(timing or Late())
        self.caller = FakeStream(self, self.lanes.caller)
        self.issuing = self.caller
        self.reuses_memory = False
        """Whether new device memory was used before, and the kernels that used it may be behind the host: the allocator
        orders only the stream on which it allocates. The host must not write to such memory."""
        self._on_device: list[Allocation] = []
        self._pinned: list[Allocation] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(allocation.nbytes for allocation in self._on_device if not allocation.freed)

    def enter_thread(self) -> None:
        """Do nothing: one thread issues and runs everything, on the only device."""

    def stream(self) -> FakeStream:
        return FakeStream(self, self.lanes.add_stream())

    def current_stream(self) -> FakeStream:
        return self.issuing

    def event(self) -> FakeEvent:
        return FakeEvent(self.lanes)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        allocation = Allocation(self.lanes, numel * dtype.itemsize, self.issuing.queue)
        if self.reuses_memory:
            self._issue(allocation.fill_with_nan)
        self._on_device = [*(other for other in self._on_device if not other.freed), allocation]
        return allocation.hand_out(dtype)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        allocation = Allocation(self.lanes, numel * dtype.itemsize, None)
        self._pinned = [*(other for other in self._pinned if not other.freed), allocation]
        return allocation.hand_out(dtype)

    def host_slab(self, size_bytes: int) -> FakeSlab:
        return FakeSlab(self.empty_host(size_bytes, torch.uint8))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy, as ``cudaMemcpyAsync`` does. A pageable source is read at once.

        Pageable memory is host memory that is not from ``empty_host``. With it the copy "might be synchronous" ("API
        synchronization behavior", CUDA runtime) or not; here the host does not wait. A conversion to another dtype
        happens on the device (PyTorch's ``Copy.cpp``), so it is late, too.
        """
        if self._allocation(source) is None:
            source = source.clone()
        for tensor in (destination, source):
            allocation = self._allocation(tensor)
            if allocation in self._pinned:
                allocation.record(self.issuing.queue)
        target, origin = self._address_of(destination), self._address_of(source)
        written = self._allocation(destination)

        def copy() -> None:
            assert written is None or not written.is_reused, "a copy wrote to memory that was freed before"
            target.copy_(origin)

        self._issue(copy)

    def copy_each(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue one kernel that copies all of them."""

        def copy(*tensors: torch.Tensor) -> None:
            for destination, source in zip(tensors[::2], tensors[1::2], strict=True):
                destination.copy_(source)

        self.launch(copy, *(tensor for pair in copies for tensor in pair))

    def occupy(self, seconds: float) -> None:
        """Queue one operation that does nothing. The ``Timing`` chooses for how long the stream is busy."""
        self._issue(lambda: None)

    def release_cached(self) -> None:
        """Do nothing: no memory is cached."""

    def launch(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        """Queue a kernel on the issuing stream. Raise ``AssertionError`` if a tensor is in pageable memory."""
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert self._allocation(argument) is not None, (
                    "illegal memory access: a kernel was given pageable memory"
                )
        addresses = [self._address_of(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        self._issue(lambda: kernel(*addresses))

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Do as ``torch.Tensor.record_stream``: once freed, the memory is not reused before ``stream`` is done with
        it."""
        allocation = self._allocation(tensor)
        assert allocation is not None
        allocation.record(stream.queue)

    def _issue(self, operation: Operation) -> None:
        self.issuing.queue.add(operation)
        self.lanes.run_before_wait()

    def _allocation(self, tensor: torch.Tensor) -> Allocation | None:
        """Return the allocation that holds ``tensor``, or None if it is in pageable memory."""
        allocations = (allocation for allocation in (*self._on_device, *self._pinned) if allocation.holds(tensor))
        return next(allocations, None)

    def _address_of(self, tensor: torch.Tensor) -> torch.Tensor:
        allocation = self._allocation(tensor)
        return tensor if allocation is None else allocation.address_of(tensor)


class LateAdam(AdamKernel):
    """A test double of a GPU kernel: ``kernel``, launched on the issuing stream."""

    def __init__(self, device: FakeDevice, kernel: AdamKernel) -> None:
        self._device = device
        self._kernel = kernel

    def zero(self, tensors: AdamTensors) -> None:
        self._kernel.zero(tensors)

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._kernel.begin_step(steps)

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        names = [field.name for field in fields(tensors) if getattr(tensors, field.name) is not None]

        def update(*arguments: torch.Tensor) -> None:
            self._kernel.update(sub_group, replace(tensors, **dict(zip(names, arguments, strict=True))), element_range)

        self._device.launch(update, *(getattr(tensors, name) for name in names))

    def restart(self) -> None:
        self._kernel.restart()

    def close(self) -> None:
        self._kernel.close()
