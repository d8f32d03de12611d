"""Implement the device interface as a test double, with queues and allocations that need no GPU.

An operation that is issued on a stream is only queued. It runs when the host waits for it, or earlier if the ``Timing``
lets it. The ``Timing`` also chooses the order, among the orders that streams and events permit. All operations,
including the tasks of the CPU lane, run on the thread that issues or waits, so that a run is a function of its timing.

The memory of a tensor is free as soon as the last Python reference to it is gone: an operation that was issued keeps an
address, not a reference. Freed memory is overwritten with NaN as early as its next owner could write to it:

- Device memory belongs to the stream it was allocated on. That stream's next operation may be the next owner's, so the
  stream's own earlier operations are safe (CUDACachingAllocator).
- Pinned host memory belongs to the host, which may write at once. Asynchronous copies record their stream by themselves
  (CachingHostAllocator); kernels that read the memory through its address do not.

A copy that writes to the memory later would overwrite the data of its next owner: it raises ``AssertionError``.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, ElementRange
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime.worker import Task, complete_future
from tests.fake_device.queues import Lanes, Late, Operation, Queue, Ready, Timing

_NAN_BYTE = 0xFF
"""All bits set is a NaN in fp32, fp16 and bf16."""


class Allocation:
    """A block of ``nbytes`` bytes: device memory of the stream ``owner``, or pinned memory if ``owner`` is None."""

    def __init__(self, lanes: Lanes, nbytes: int, owner: Queue | None) -> None:
        self.nbytes = nbytes
        self.freed = False
        self.is_reused = False
        """Whether the block may be another owner's by now."""
        self._lanes = lanes
        self.users = set() if owner is None else {owner}
        self._memory = bytearray(nbytes or 1)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.fill_with_nan()

    def fill_with_nan(self) -> None:
        """Overwrite all elements, as any write of another owner does."""
        self._bytes.fill_(_NAN_BYTE)

    def hand_out(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the user's tensor. Call this once: the block is freed with the last tensor that shares the storage."""
        buffer = (ctypes.c_uint8 * len(self._memory)).from_buffer(self._memory)
        weakref.finalize(buffer, self._free).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)[: self.nbytes].view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of ``tensor`` is in this block."""
        return not self.freed and 0 <= tensor.data_ptr() - self._bytes.data_ptr() < len(self._memory)

    def address_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same elements, shape and dtype, without a reference that keeps the block from being freed."""
        assert tensor.is_contiguous()
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        return self._bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _free(self) -> None:
        self.freed = True
        finished = [queue.mark() for queue in self.users]
        self._lanes.as_soon_as(lambda: all(done() for done in finished), self._overwrite)

    def _overwrite(self) -> None:
        self.is_reused = True
        self.fill_with_nan()


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
        """Return a function that returns whether the work marked *by now* has finished."""
        return self._reached

    def synchronize(self) -> None:
        self._lanes.run_until(self._reached)

    def finished(self) -> bool:
        return self._reached()

    def seconds_after(self, origin: FakeEvent) -> float:
        """Return the number of operations between the two events, in place of seconds."""
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
        """Queue the copy, as ``cudaMemcpyAsync`` does. A pageable source, not from ``empty_host``, is read at once.

        With pageable memory CUDA's copy "might be synchronous" or not; here the host does not wait.
        """
        if self._allocation(source) is None:
            source = source.clone()
        for tensor in (destination, source):
            allocation = self._allocation(tensor)
            if allocation in self._pinned:
                allocation.users.add(self.issuing.queue)
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
        self._issue(lambda: None)  # the timing chooses for how long the stream is busy

    def launch(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        """Queue a kernel on the issuing stream. Raise ``AssertionError`` if a tensor is in pageable memory."""
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert self._allocation(argument) is not None, (
                    "illegal memory access: a kernel was given pageable memory"
                )
        addresses = [self._address_of(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        self._issue(lambda: kernel(*addresses))

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
