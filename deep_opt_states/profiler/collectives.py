"""Measure the collectives of ZeRO-3: all-gathers and reduce-scatters of bf16 elements, on the caller's stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.process_groups import CollectiveGroup
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import synchronize

TIMED = 4
"""Collectives that are timed per repetition, one after another."""

PERIOD = 251
"""The gathered elements are ascending integers that begin again at zero after this many. bf16 can represent them."""

RANK_OFFSET = 31
"""The gathered elements of a rank begin this much later in the period than those of the rank before it."""

MAX_SUM = 256
"""bf16 represents all integers up to this one, so that sums of integers up to it are exact in every order."""


class AllGather:
    """A probe of all-gathers of ``whole_bytes``, of which each rank of ``group`` has an equal part."""

    def __init__(self, device: Device[Any], group: CollectiveGroup, whole_bytes: int, quantity: str) -> None:
        numel = _part_numel(whole_bytes, group)
        self._device = device
        self._group = group
        self._quantity = quantity
        self._part, self._whole = (device.empty(count, torch.bfloat16) for count in (numel, numel * group.size))
        device.copy(self._part, self._gathered_from(group.rank))
        self._whole.fill_(torch.nan)
        synchronize(device)

    def repeat(self) -> Rates:
        """Gather several times, and return the bytes that this rank received per second."""
        elapsed_s = _seconds_each(self._device, lambda: self._group.all_gather(self._whole, self._part))
        return {self._quantity: _passed_bytes(self._whole, self._group) / elapsed_s}

    def verify(self) -> None:
        """Raise ``ProbeError`` if an element of any rank did not arrive."""
        expected = torch.cat([self._gathered_from(rank) for rank in range(self._group.size)])
        _require_equal(self._device, self._whole, expected, "gathered")

    def _gathered_from(self, rank: int) -> torch.Tensor:
        return _ascending(RANK_OFFSET * rank, self._part.numel(), PERIOD)


class ReduceScatter:
    """A probe of reduce-scatters of ``whole_bytes`` per rank of ``group``. Each rank keeps an equal part of the sum."""

    def __init__(self, device: Device[Any], group: CollectiveGroup, whole_bytes: int, quantity: str) -> None:
        numel = _part_numel(whole_bytes, group)
        self._device = device
        self._group = group
        self._quantity = quantity
        self._period = max(2, MAX_SUM // group.size)
        self._part, self._whole = (device.empty(count, torch.bfloat16) for count in (numel, numel * group.size))
        device.copy(self._whole, self._reduced_from(group.rank))
        self._part.fill_(torch.nan)
        synchronize(device)

    def repeat(self) -> Rates:
        """Reduce several times, and return the bytes that this rank sent per second."""
        elapsed_s = _seconds_each(self._device, lambda: self._group.reduce_scatter(self._part, self._whole))
        return {self._quantity: _passed_bytes(self._whole, self._group) / elapsed_s}

    def verify(self) -> None:
        """Raise ``ProbeError`` if an element of this rank's part is not the sum of all ranks."""
        begin = self._group.rank * self._part.numel()
        expected = torch.zeros_like(self._part, device="cpu")
        for rank in range(self._group.size):
            expected += self._reduced_from(rank)[begin : begin + self._part.numel()]
        _require_equal(self._device, self._part, expected, "reduced")

    def _reduced_from(self, rank: int) -> torch.Tensor:
        return _ascending(rank, self._whole.numel(), self._period)


def _seconds_each(device: Device[Any], issue: Callable[[], object]) -> float:
    """Return the device's seconds per collective that ``issue`` issues on the current stream.

    The first collective is not timed: its beginning depends on when the other ranks issue it. The others are issued
    while it runs, so that the time includes no launches.
    """
    begin, end = device.event(), device.event()
    stream = device.current_stream()
    issue()
    stream.record(begin)
    for _ in range(TIMED):
        issue()
    stream.record(end)
    end.synchronize()
    elapsed_s: float = end.seconds_after(begin)
    return elapsed_s / TIMED


def _part_numel(whole_bytes: int, group: CollectiveGroup) -> int:
    return whole_bytes // torch.bfloat16.itemsize // group.size


def _passed_bytes(whole: torch.Tensor, group: CollectiveGroup) -> float:
    """Return the bytes that a rank receives in an all-gather, or sends in a reduce-scatter: all parts but its own."""
    return whole.nbytes * (group.size - 1) / group.size


def _ascending(first: int, numel: int, period: int) -> torch.Tensor:
    """Return ``numel`` ascending integers modulo ``period``, beginning with ``first``, as bf16 on the host."""
    once = (torch.arange(first, first + period, device="cpu") % period).bfloat16()
    return once.repeat(-(-numel // period))[:numel]


def _require_equal(device: Device[Any], result: torch.Tensor, expected: torch.Tensor, how: str) -> None:
    arrived = torch.empty_like(expected)
    device.copy(arrived, result)
    synchronize(device)
    wrong = arrived != expected
    if wrong.any():
        raise ProbeError(
            f"the {how} elements are wrong: {int(wrong.sum())} of {wrong.numel()}, "
            f"the first of them at index {int(wrong.nonzero()[0])}"
        )
