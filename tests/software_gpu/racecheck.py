"""Check that all accesses of a program are ordered, whatever the timing was: the setting ``racecheck`` of the device.

The device itself knows streams, events, waits, operators, copies, kernels and allocations (``csrc/racecheck.h``). This
module reports to it how the host's threads hand over to each other, and which memory the CPU kernels and
transfers to disk access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from deep_opt_states.device.kernels.adam import STATES, AdamTensors, RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.device.state_file import StateFile
from deep_opt_states.runtime.uninterrupted import Section
from deep_opt_states.runtime.worker import Worker
from tests.software_gpu.device import ranges
from tests.software_gpu.library import call

BETWEEN = "\n  and "
"""The text between the two accesses of a race."""


class RaceError(AssertionError):
    """Accesses that nothing orders."""


def take_races() -> list[str]:
    """Return the races that were found since the last call, each with both accesses, ``BETWEEN`` them."""
    lines = call("take_races").decode().splitlines()
    return [line.replace("\tand\t", BETWEEN).replace("\t", "\n  ") for line in lines]


class HostMoment:
    """A point in a thread, after all that it has done and waited for so far."""

    def __init__(self) -> None:
        self._snapshot = call("snapshot_of_host")

    def order_this_thread(self) -> None:
        """Order all later work of the calling thread after this moment."""
        call("order_host_after", self._snapshot)

    def __del__(self) -> None:
        call("delete_snapshot", self._snapshot)


@contextmanager
def checked_threads() -> Iterator[None]:
    """Report the hand-overs between threads, and the accesses of the CPU kernels and of transfers to disk."""
    with ExitStack() as patches:
        for threads in (Worker, ThreadPoolExecutor):
            patches.enter_context(mock.patch.object(threads, "submit", _submit(threads.submit)))
        patches.enter_context(mock.patch.object(Section, "__init__", _initialize(Section.__init__)))
        patches.enter_context(mock.patch.object(Section, "wait_for_end", _wait_for_end(Section.wait_for_end)))
        patches.enter_context(mock.patch.object(FusedAdam, "update_ranges", _update(FusedAdam.update_ranges)))
        patches.enter_context(mock.patch.object(StockAdam, "update", _stock_update(StockAdam.update)))
        for name, writes in (("read", True), ("write", False)):
            patches.enter_context(mock.patch.object(StateFile, name, _transfer(getattr(StateFile, name), writes)))
        yield


class HandedOver:
    """A task that another thread runs. Its start is after its creation, and its end before ``order_this_thread``."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self._created = run, HostMoment()
        self._ended: HostMoment | None = None

    def __call__(self) -> Any:
        self._created.order_this_thread()
        try:
            return self._run()
        finally:
            self._ended = HostMoment()

    def order_this_thread(self) -> None:
        """Order the calling thread after the end, if the task has ended."""
        if self._ended is not None:
            self._ended.order_this_thread()


def _submit(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def submit_handed_over(self: Any, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        handed_over = HandedOver(partial(task, *args, **kwargs))
        future = submit(self, handed_over)
        for name in ("result", "exception"):
            setattr(future, name, _ordered(handed_over, getattr(future, name)))
        return future

    return submit_handed_over


def _ordered(handed_over: HandedOver, wait: Callable[..., Any]) -> Callable[..., Any]:
    def ordered_wait(timeout: float | None = None) -> Any:
        try:
            return wait(timeout)
        finally:
            handed_over.order_this_thread()

    return ordered_wait


def _initialize(initialize: Callable[..., None]) -> Callable[..., None]:
    def initialize_handed_over(self: Any, run: Callable[[], Any], stream: Any) -> None:
        self.handed_over = HandedOver(run)
        initialize(self, self.handed_over, stream)

    return initialize_handed_over


def _wait_for_end(wait_for_end: Callable[..., bool]) -> Callable[..., bool]:
    def wait_for_ordered_end(self: Any, timeout_s: float | None = None) -> bool:
        ended = wait_for_end(self, timeout_s)
        if ended:
            self.handed_over.order_this_thread()
        return ended

    return wait_for_ordered_end


def _update(update_ranges: Callable[..., None]) -> Callable[..., None]:
    def recorded_update(self: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
        for update in updates:
            tensors = update.tensors
            states = [getattr(tensors, name) for name in STATES]
            reads, writes = [tensors.grad], states
            if update.updated is not None:
                reads, writes = [tensors.grad, *states], list(update.updated)
            if tensors.param is not None:
                writes = [*writes, tensors.param]
            _access("CPU Adam", reads, writes)
        update_ranges(self, updates)

    return recorded_update


def _stock_update(update: Callable[..., None]) -> Callable[..., None]:
    def recorded_update(self: StockAdam, sub_group: int, tensors: AdamTensors, *args: Any) -> None:
        _access("CPU Adam of stock", [tensors.grad], [getattr(tensors, name) for name in STATES])
        update(self, sub_group, tensors, *args)

    return recorded_update


def _transfer(transfer: Callable[..., None], writes: bool) -> Callable[..., None]:
    def recorded_transfer(self: StateFile, memory: memoryview, offset_bytes: int) -> None:
        accessed = [torch.frombuffer(memory, dtype=torch.uint8)]
        _access(*(("a read from disk", (), accessed) if writes else ("a write to disk", accessed, ())))
        transfer(self, memory, offset_bytes)

    return recorded_transfer


def _access(name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    accessed = ranges(reads, writes)
    call("access_on_host", name.encode(), accessed, len(accessed))
