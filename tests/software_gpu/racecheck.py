"""Check that all accesses of a program are ordered, whatever the timing was: the setting ``racecheck`` of the device.

The device itself knows its streams and memory (``csrc/racecheck.h``). This module reports to it how the host's threads
hand over to each other, and which memory the CPU kernels and transfers to disk access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
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


class RaceError(AssertionError):
    """Accesses that nothing orders."""


def take_races() -> list[str]:
    """Return the races that were found since the last call, each with both accesses, ``BETWEEN`` them."""
    lines = call("take_races").decode().splitlines()
    return [line.replace("\tand\t", BETWEEN).replace("\t", "\n  ") for line in lines]


class HostMoment:
    def __init__(self) -> None:
        self._snapshot = call("snapshot_of_host")

    def order_this_thread(self) -> None:
        """Order all later work of the calling thread after this moment."""
        call("order_host_after", self._snapshot)

    def __del__(self) -> None:
        call("delete_snapshot", self._snapshot)


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


class OrderedFuture(Future[Any]):
    handed_over: HandedOver

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self.handed_over.order_this_thread()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.handed_over.order_this_thread()


@contextmanager
def checked_threads() -> Iterator[None]:
    """Report the hand-overs between threads, and the accesses of the CPU kernels and of transfers to disk."""
    with ExitStack() as patches:
        for owner, name, function in (
            (Worker, "submit", _submit),
            (ThreadPoolExecutor, "submit", _submit),
            (Section, "__init__", _initialize),
            (Section, "wait_for_end", _wait_for_end),
            (FusedAdam, "update_ranges", _update),
            (StockAdam, "update", _stock_update),
            (StateFile, "read", _read),
            (StateFile, "write", _write),
        ):
            method = partialmethod(function, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, method))
        yield


# Methods that are called with the object, the original method and its arguments.


def _submit(self: Any, submit: Any, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    handed_over = HandedOver(partial(task, *args, **kwargs))
    future: Any = submit(self, handed_over)
    future.__class__, future.handed_over = OrderedFuture, handed_over
    return future  # type: ignore[no-any-return]


def _initialize(self: Any, initialize: Any, run: Callable[[], Any], stream: Any) -> None:
    self.handed_over = HandedOver(run)
    initialize(self, self.handed_over, stream)


def _wait_for_end(self: Any, wait_for_end: Any, timeout_s: float | None = None) -> bool:
    ended: bool = wait_for_end(self, timeout_s)
    if ended:
        self.handed_over.order_this_thread()
    return ended


def _update(self: FusedAdam, update_ranges: Any, updates: Sequence[RangeUpdate]) -> None:
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


def _stock_update(self: StockAdam, update: Any, sub_group: int, tensors: AdamTensors, *args: Any) -> None:
    _access("CPU Adam of stock", [tensors.grad], [getattr(tensors, name) for name in STATES])
    update(self, sub_group, tensors, *args)


def _read(self: StateFile, read: Any, memory: memoryview, offset_bytes: int) -> None:
    _access("a read from disk", (), [torch.frombuffer(memory, dtype=torch.uint8)])
    read(self, memory, offset_bytes)


def _write(self: StateFile, write: Any, memory: memoryview, offset_bytes: int) -> None:
    _access("a write to disk", [torch.frombuffer(memory, dtype=torch.uint8)], ())
    write(self, memory, offset_bytes)


def _access(name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    accessed = ranges(reads, writes)
    call("access_on_host", name.encode(), accessed, len(accessed))
