"""Place ramps so that they fit in GPU memory, and remember from which ramp each plan comes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perf_model.prediction.lane_queues import Integers
from perf_model.prediction.memory import TrainingSetup
from perf_model.schedule.workload import Workload
from perf_model.search.memory_check import MemoryCheck
from perf_model.search.ramps import Ramp, place_ramps

Plan = tuple[Integers, int]
"""The codes of the placements of a plan, and the number of slots."""

PlanKey = tuple[bytes, int]
"""A key that is equal for equal plans."""


def key_of(plan: Plan) -> PlanKey:
    """Return a key that is equal for equal plans."""
    codes, num_slots = plan
    return codes.tobytes(), num_slots


class PlacedRamps:
    """The ramps of one workload that were placed. ``ramp_of`` maps the keys of their plans to them."""

    def __init__(self, workload: Workload, gpu_bytes: int | None, setup: TrainingSetup, memory: MemoryCheck) -> None:
        self.ramp_of: dict[PlanKey, Ramp] = {}
        self._workload = workload
        self._gpu_bytes = gpu_bytes
        self._setup = setup
        self._memory = memory

    def place(self, ramps: Sequence[Ramp], *, tightly: bool = False) -> list[Plan]:
        """Return the plans of ``ramps``. Some may exceed the memory a little, because ``place_ramps`` estimates it.

        ``tightly``: those that do are placed again, with fewer units in GPU memory.
        """
        if not ramps:
            return []
        placed = place_ramps(ramps, self._workload, self._gpu_bytes, self._setup)
        slots = np.array([max(1, ramp.num_slots) for ramp in ramps])
        if tightly and self._gpu_bytes is not None:
            excess_bytes = self._memory.excess_bytes(placed, slots)
            over = np.flatnonzero(excess_bytes > 0)
            if len(over):
                too_large = [ramps[index] for index in over.tolist()]
                less_bytes = self._gpu_bytes - excess_bytes[over]
                placed[over] = place_ramps(too_large, self._workload, less_bytes, self._setup)
        plans = list(zip(placed, slots.tolist(), strict=True))
        for plan, ramp in zip(plans, ramps, strict=True):
            self.ramp_of.setdefault(key_of(plan), ramp)
        return plans
