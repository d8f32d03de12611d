"""What placements cannot go below, many at once: ``Floor`` in exposed seconds, in whatever order, and ``MemoryFloor``.

The planner looks closer at a placement only if both leave it a chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import Memory, memory_of
from perf_model.prediction.overlap_windows import EARLY, Windows
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets
from perf_model.search.limits import KINDS, Limits

Array = npt.NDArray[np.float64]

Placed = Mapping[Placement, npt.NDArray[np.bool_]]
"""By placement, which sub-groups (columns) of each candidate (rows) have it."""

_BEFORE_FORWARD: dict[Placement, tuple[ActionKind, ActionKind | None]] = {
    Placement.CPU: (ActionKind.CPU_STEP, ActionKind.PUBLISH),
    Placement.STREAMED: (ActionKind.PREFETCH, ActionKind.GPU_STEP),
    Placement.RESIDENT: (ActionKind.GPU_STEP, None),
}
"""What forward waits for: an action in series with its like, and one that follows it."""


def placed(candidates: Sequence[tuple[Placement, ...]]) -> Placed:
    known = list(Placement)
    codes = np.array([[known.index(its) for its in candidate] for candidate in candidates])
    return {its: codes == code for code, its in enumerate(known)}


class Floor:
    def __init__(self, workload: Workload, cost: CostModel, windows: Windows) -> None:
        self._numels = np.array([sub_group.numel for sub_group in workload.sub_groups], dtype=np.float64)
        self._windows = windows
        limits = Limits.of(cost)
        self._busy_s = {its: limits.of_placement(its) for its in cost.placements}
        self._early_s = limits.seconds[:, KINDS.index(EARLY)]
        self._needed_s = windows.forward_s * (np.cumsum(self._numels) - self._numels) / self._numels.sum()
        loads = {kind: cost.load(kind, 1) for its in cost.placements for kind in CHAINS[its]}
        self._total_s: dict[ActionKind, Array] = {
            kind: load.latency_s + load.alone_s * self._numels for kind, load in loads.items()
        }

    def at_least_s(self, candidates: Placed, most_slots: int) -> Array:
        """Of each: the work, of which backward hides what it fills the slots with; what is done before the first flush;
        and that of the sub-groups that forward needs by some moment, whatever their order, one is ready last, after the
        updates of all on its lane."""
        windows = self._windows
        count = len(candidates[Placement.CPU])
        busy_s, seen_s = np.zeros((count, len(self._busy_s[Placement.CPU]))), np.zeros(count)
        for placement, of_limits in self._busy_s.items():
            has = candidates[placement]
            busy_s += np.outer(has @ self._numels, of_limits)
            first, second = (self._total_s[kind] if kind else 0.0 * self._numels for kind in _BEFORE_FORWARD[placement])
            early_s = windows.backward_s if placement is Placement.STREAMED else 0.0
            # What is updated from a prefetch during backward still waits for the step to be decided.
            last_s = np.minimum.accumulate(np.where(has, second, np.inf), axis=1)
            ready_s = np.maximum(0.0, np.cumsum(has * first, axis=1) - early_s) + last_s
            seen_s = np.maximum(seen_s, np.where(has, ready_s - self._needed_s, 0.0).max(axis=1))
            if placement is Placement.STREAMED:
                before_s = np.where(has, np.maximum(0.0, first - early_s) + second, np.inf).min(axis=1)
                flushed_s = np.where(has.any(axis=1), before_s + has @ self._total_s[ActionKind.FLUSH_STATES], 0.0)
                seen_s = np.maximum(seen_s, flushed_s - windows.forward_s)
        streamed = candidates[Placement.STREAMED] * self._numels
        in_slots = np.minimum(streamed.sum(axis=1), most_slots * streamed.max(axis=1))
        hidden_s = np.minimum(windows.backward_s, np.outer(in_slots, self._early_s))
        least_s: Array = np.maximum(seen_s, (busy_s - hidden_s).max(axis=1) - windows.forward_s)
        return least_s

    def in_slots_at_least_s(self, placements: tuple[Placement, ...], num_slots: int) -> float:
        """Of a candidate with so many slots: each is in use by one sub-group from its prefetch to its flush, of which
        backward hides the first prefetch."""
        streamed = np.array([its is Placement.STREAMED for its in placements])
        if not streamed.any():
            return 0.0
        chain_s = sum(float(self._total_s[kind][streamed].sum()) for kind in CHAINS[Placement.STREAMED])
        first_s = float(np.sort(self._total_s[EARLY][streamed])[-num_slots:].sum())
        return (chain_s - min(self._windows.backward_s, first_s)) / num_slots - self._windows.forward_s


class MemoryFloor:
    """Host and pinned bytes are sums over the sub-groups; of the accelerator's, what one slot and residents
    hold, and the gradients where there is either."""

    def __init__(self, workload: Workload, param_bytes: int) -> None:
        self._numels = np.array([sub_group.numel for sub_group in workload.sub_groups])
        self._param_bytes = param_bytes

    @cached_property
    def _alone(self) -> dict[Placement, list[Memory]]:
        """Of each sub-group; only where a budget asks for it, as it takes its time."""

        @cache
        def memory(numel: int, its: Placement) -> Memory:
            plan = UpdatePlan(workload=Workload.of([numel]), placements=(its,), num_slots=1)
            return memory_of(plan, self._param_bytes)

        return {its: [memory(numel, its) for numel in self._numels.tolist()] for its in Placement}

    def missing_bytes(self, candidates: Placed, budgets: Budgets) -> npt.NDArray[np.int64]:
        """Of each: at least so many bytes more than the budgets, in all; 0 for what may fit."""
        missing_bytes = np.zeros(len(candidates[Placement.CPU]), dtype=np.int64)
        if budgets.gpu_bytes is not None:
            resident = candidates[Placement.RESIDENT] @ self._numels
            slot = (candidates[Placement.STREAMED] * self._numels).max(axis=1)
            states_bytes = (resident + slot) * STAGED_BYTES_PER_PARAM
            gpu_bytes = states_bytes + (states_bytes > 0) * self._numels.sum() * self._param_bytes
            missing_bytes += np.maximum(0, gpu_bytes - budgets.gpu_bytes)
        for name in ("host_bytes", "pinned_bytes"):
            if (budget := getattr(budgets, name)) is not None:
                each_bytes = {
                    its: np.array([getattr(memory, name) for memory in self._alone[its]]) for its in candidates
                }
                taken_bytes = sum(has @ each_bytes[its] for its, has in candidates.items())
                missing_bytes += np.maximum(0, taken_bytes - budget)
        return missing_bytes
