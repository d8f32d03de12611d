"""Check quickly whether one of many plans of the same workload fits in the memory of the accelerator."""

from __future__ import annotations

from collections import Counter

import numpy as np

from perf_model.prediction.lane_queues import CODES, Integers
from perf_model.prediction.memory import TrainingSetup, cuda_bytes_of, on_accelerator
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload


class MemoryCheck:
    """The memory of plans of one workload, computed from how many units of each length have each placement.

    Each combination of these numbers is computed once. Where tensors share segments of the allocator, which happens up
    to 10 MiB, the order of the units makes a difference that is not counted: ``memory_of`` is exact.
    """

    def __init__(self, workload: Workload, gpu_bytes: int | None, setup: TrainingSetup) -> None:
        lengths, of_units = np.unique([unit.numel for unit in workload.units], return_inverse=True)
        self._lengths: list[int] = lengths.tolist()
        self._first_cell = len(CODES) * of_units
        self._gpu_bytes = gpu_bytes
        self._setup = setup
        self._known: dict[tuple[bytes, int], bool] = {}

    def fits(self, codes: Integers, num_slots: int) -> bool:
        """Return whether the plan with placements ``codes`` and ``num_slots`` slots fits."""
        if self._gpu_bytes is None:
            return True
        counts = np.bincount(self._first_cell + codes, minlength=len(self._lengths) * len(CODES))
        key = counts.tobytes(), num_slots
        if key not in self._known:
            self._known[key] = self._taken_bytes(counts.reshape(-1, len(CODES)), num_slots) <= self._gpu_bytes
        return self._known[key]

    def _taken_bytes(self, counts: Integers, num_slots: int) -> int:
        numels = {
            placement: Counter({numel: count for numel, count in zip(self._lengths, column, strict=True) if count})
            for placement, column in zip(CODES, counts.T.tolist(), strict=True)
        }
        streamed, residents = numels[Placement.STREAMED], numels[Placement.RESIDENT]
        return cuda_bytes_of(on_accelerator(streamed, residents, numels[Placement.CPU], num_slots, self._setup))
