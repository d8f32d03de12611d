"""Compute lower bounds of many placements at once, so that the planner simulates only those that may be better.

``TimeLowerBounds`` bounds the exposed seconds whatever the order of the units, and ``MemoryLowerBounds`` bounds
the memory of the accelerator. The planner skips a placement if either bound rules it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.resource_constraints import KINDS, Array, ResourceConstraints

PlacementMasks = Mapping[Placement, npt.NDArray[np.bool_]]
"""Boolean masks of shape [candidate, unit], by placement: which units of a candidate have the placement."""

_BEFORE_FORWARD: dict[Placement, tuple[ActionKind, ActionKind | None]] = {
    Placement.CPU: (ActionKind.CPU_STEP, ActionKind.PUBLISH),
    Placement.STREAMED: (ActionKind.PREFETCH, ActionKind.GPU_STEP),
    Placement.RESIDENT: (ActionKind.GPU_STEP, None),
}
"""The actions that forward waits for: the first kind runs one unit after another, the second kind follows it."""


def placement_masks(candidates: Sequence[tuple[Placement, ...]]) -> PlacementMasks:
    """Return the masks of ``candidates``, which are placements of the same units."""
    known = list(Placement)
    codes = np.array([[known.index(placement) for placement in candidate] for candidate in candidates])
    return {placement: codes == code for code, placement in enumerate(known)}


class TimeLowerBounds:
    """Lower bounds of the exposed seconds of placements of one workload."""

    def __init__(self, workload: Workload, cost: CostModel, windows: Windows) -> None:
        assert windows.first_use is None, "the workload is arranged"
        self._numels = np.array([unit.numel for unit in workload.units], dtype=np.float64)
        self._windows = windows
        constraints = ResourceConstraints.from_cost(cost)
        self._busy_s = {placement: constraints.seconds_per_param(placement) for placement in cost.placements}
        hidden = [KINDS.index(kind) for kind in windows.hidden_in_backward]
        self._hidden_s = constraints.seconds[:, hidden].sum(axis=1)
        used = np.array([unit.forward_numel for unit in workload.units], dtype=np.float64)
        self._needed_s = windows.forward_s * (np.cumsum(used) - used) / used.sum()
        loads = {kind: cost.load(kind, 1) for placement in cost.placements for kind in CHAINS[placement]}
        self._total_s: dict[ActionKind, Array] = {
            kind: load.latency_s + load.alone_s * self._numels for kind, load in loads.items()
        }

    def exposed_s(self, candidates: PlacementMasks, max_slots: int) -> Array:
        """Return a lower bound of the exposed seconds of each candidate, with up to ``max_slots`` slots.

        It is the maximum of three bounds:

        - All the work, of which backward hides only the prefetches that fill the slots and the flushes that empty
          them, and forward all that it can.
        - The flushes, which run one after another, after the prefetch and the update of one unit. The next backward
          hides them.
        - The units that forward needs up to a given moment. In any order, the last of them is finished only after
          its lane has updated all of them.
        """
        windows = self._windows
        count = len(candidates[Placement.CPU])
        busy_s, exposed_s = np.zeros((count, len(self._busy_s[Placement.CPU]))), np.zeros(count)
        for placement, per_param_s in self._busy_s.items():
            mask = candidates[placement]
            busy_s += np.outer(mask @ self._numels, per_param_s)
            first, second = (self._total_s[kind] if kind else 0.0 * self._numels for kind in _BEFORE_FORWARD[placement])
            prefetch_s = windows.backward_s if placement is Placement.STREAMED else 0.0
            # An update has to wait until the step is decided, even if its states were prefetched in backward.
            last_s = np.minimum.accumulate(np.where(mask, second, np.inf), axis=1)
            ready_s = np.maximum(0.0, np.cumsum(mask * first, axis=1) - prefetch_s) + last_s
            exposed_s = np.maximum(exposed_s, np.where(mask, ready_s - self._needed_s, 0.0).max(axis=1))
            if placement is Placement.STREAMED:
                before_s = np.where(mask, np.maximum(0.0, first - prefetch_s) + second, np.inf).min(axis=1)
                flushed_s = np.where(mask.any(axis=1), before_s + mask @ self._total_s[ActionKind.FLUSH_STATES], 0.0)
                if ActionKind.FLUSH_STATES in windows.hidden_in_backward:
                    flushed_s -= windows.backward_s
                exposed_s = np.maximum(exposed_s, flushed_s - windows.forward_s)
        streamed = candidates[Placement.STREAMED] * self._numels
        in_slots = np.minimum(streamed.sum(axis=1), max_slots * streamed.max(axis=1))
        hidden_s = np.minimum(windows.backward_s, np.outer(in_slots, self._hidden_s))
        least_s: Array = np.maximum(exposed_s, (busy_s - hidden_s).max(axis=1) - windows.forward_s)
        return least_s

    def exposed_s_with_slots(self, placements: tuple[Placement, ...], num_slots: int) -> float:
        """Return a lower bound of the exposed seconds of one candidate with ``num_slots`` slots.

        One unit occupies a slot from its prefetch to its flush. Backward can hide only the first prefetch into
        each slot, and with a window of forward also the last flush from it: both kinds run one after another, and no
        longer than backward.
        """
        streamed = np.array([placement is Placement.STREAMED for placement in placements])
        if not streamed.any():
            return 0.0
        chain_s = sum(float(self._total_s[kind][streamed].sum()) for kind in CHAINS[Placement.STREAMED])
        hidden_s = sum(
            min(self._windows.backward_s, float(np.sort(self._total_s[kind][streamed])[-num_slots:].sum()))
            for kind in self._windows.hidden_in_backward
        )
        return (chain_s - hidden_s) / num_slots - self._windows.forward_s


class MemoryLowerBounds:
    """Lower bounds of the accelerator's memory that placements of one workload take.

    They count the residents, one slot, and the gradients that are on the accelerator.
    """

    def __init__(self, workload: Workload, setup: TrainingSetup) -> None:
        self._numels = np.array([unit.numel for unit in workload.units])
        self._setup = setup

    def gpu_bytes(self, candidates: PlacementMasks) -> npt.NDArray[np.int64]:
        """Return a lower bound of the bytes that each candidate takes."""
        resident, streamed = candidates[Placement.RESIDENT], candidates[Placement.STREAMED]
        longest_slot = (streamed * self._numels).max(axis=1)
        updated = resident | streamed
        kept = updated @ self._numels
        if self._setup.accumulates:
            kept = np.where(kept > 0, self._numels.sum(), 0)
        states_bytes = (resident @ self._numels + longest_slot) * self._setup.widths.staged_bytes
        taken_bytes: npt.NDArray[np.int64] = states_bytes + kept * self._setup.widths.grad
        return taken_bytes
