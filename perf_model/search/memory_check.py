"""Check quickly whether one of many plans of the same workload fits in the memory of the accelerator."""

from __future__ import annotations

from collections import Counter

import numpy as np

from perf_model.prediction.lane_queues import CODES, Booleans, Integers
from perf_model.prediction.memory import (
    TrainingSetup,
    block_bytes_of,
    cuda_bytes_of,
    gradients_on_accelerator,
    has_its_own_segment,
    rounding_buffer,
    states_on_accelerator,
)
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload


class MemoryCheck:
    """The memory of plans of one workload.

    A tensor with a segment of its own takes the same memory in every plan, so these are added up per unit. The few
    shorter tensors share segments: their memory is computed once for each combination of how many units of each length
    have each placement. The order of the units makes a difference there that is not counted: ``memory_of`` is exact.
    """

    def __init__(self, workload: Workload, gpu_bytes: int | None, setup: TrainingSetup) -> None:
        numels = [unit.numel for unit in workload.units]
        grad_bytes = setup.widths.grad
        states = np.array(
            [
                sum(
                    block_bytes_of(numel * width) * has_its_own_segment(numel * width)
                    for width in setup.widths.staged.values()
                )
                for numel in numels
            ]
        )
        gradients = np.array(
            [block_bytes_of(numel * grad_bytes) * has_its_own_segment(numel * grad_bytes) for numel in numels]
        )
        own_bytes = {
            Placement.CPU: gradients * setup.accumulates,
            Placement.STREAMED: gradients,
            Placement.RESIDENT: states + gradients,
        }
        self._own_bytes = np.array([own_bytes[placement] for placement in CODES])
        self._numels = np.array(numels)
        self._every = np.arange(len(numels))
        narrowest = min(grad_bytes, *setup.widths.staged.values())
        shares = [not has_its_own_segment(numel * narrowest) for numel in numels]
        self._sharing = np.flatnonzero(np.array(shares))
        lengths, of_units = np.unique(self._numels[self._sharing], return_inverse=True)
        self._lengths: list[int] = lengths.tolist()
        self._first_cell = len(CODES) * of_units
        self._gpu_bytes = gpu_bytes
        self._setup = setup
        self._known: dict[tuple[bytes, int, int, int], int] = {}

    def which_fit(self, codes: Integers, slots: Integers) -> Booleans:
        """Return whether each of the plans fits, given ``codes`` of shape [plan, unit] and the numbers of slots."""
        if self._gpu_bytes is None:
            return np.ones(len(codes), dtype=bool)
        fits: Booleans = self.excess_bytes(codes, slots) <= 0
        return fits

    def excess_bytes(self, codes: Integers, slots: Integers) -> Integers:
        """Return the bytes by which each of the plans exceeds the limit, negative if the plan leaves memory."""
        assert self._gpu_bytes is not None
        excess_bytes: Integers = self._taken_bytes(codes, slots) - self._gpu_bytes
        return excess_bytes

    def fits(self, codes: Integers, num_slots: int) -> bool:
        """Return whether the plan with placements ``codes`` and ``num_slots`` slots fits."""
        return bool(self.which_fit(codes[None], np.array([num_slots]))[0])

    def _taken_bytes(self, codes: Integers, slots: Integers) -> Integers:
        updated, streamed = codes != CODES[Placement.CPU], codes == CODES[Placement.STREAMED]
        slot_numel = np.maximum.reduce(self._numels * streamed, axis=1)
        rounded_numel = np.maximum.reduce(self._numels * updated, axis=1) * self._setup.stages_params
        slots = np.minimum(slots, np.add.reduce(streamed, axis=1))
        cells = len(self._lengths) * len(CODES)
        cell = np.arange(len(codes))[:, None] * cells + self._first_cell + codes[:, self._sharing]
        counts = np.bincount(cell.ravel(), minlength=len(codes) * cells).reshape(len(codes), cells)
        columns = (slot_numel.tolist(), slots.tolist(), rounded_numel.tolist())
        keys = zip(map(np.ndarray.tobytes, counts), *columns, strict=True)
        others = [self._slots_and_shared_bytes(*key) for key in keys]
        own_bytes = np.add.reduce(self._own_bytes[codes, self._every], axis=1)
        taken_bytes: Integers = np.where(np.logical_or.reduce(updated, axis=1), own_bytes + others, 0)
        return taken_bytes

    def _slots_and_shared_bytes(self, packed_counts: bytes, slot_numel: int, slots: int, rounded_numel: int) -> int:
        """Return the bytes of slots, rounding buffer and shared segments.

        ``packed_counts`` are the numbers of units by length and placement, for the lengths whose tensors share
        segments.
        """
        key = packed_counts, slot_numel, slots, rounded_numel
        if key not in self._known:
            self._known[key] = self._compute(np.frombuffer(packed_counts, np.int64), slot_numel, slots, rounded_numel)
        return self._known[key]

    def _compute(self, counts: Integers, slot_numel: int, slots: int, rounded_numel: int) -> int:
        numels = {
            placement: Counter({numel: count for numel, count in zip(self._lengths, column, strict=True) if count})
            for placement, column in zip(CODES, counts.reshape(-1, len(CODES)).T.tolist(), strict=True)
        }
        residents, kept = numels[Placement.RESIDENT], numels[Placement.STREAMED] + numels[Placement.RESIDENT]
        if self._setup.accumulates:
            kept += numels[Placement.CPU]
        shorter = (
            *states_on_accelerator(Counter(), residents, 0, self._setup.widths),
            *gradients_on_accelerator(kept, self._setup.widths.grad),
        )
        return cuda_bytes_of(
            [
                *states_on_accelerator(Counter({slot_numel: slots}), Counter(), slots, self._setup.widths),
                *(tensors for tensors in shorter if not has_its_own_segment(tensors.each_bytes)),
                *rounding_buffer(rounded_numel, self._setup),
            ]
        )
