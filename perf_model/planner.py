"""``plan_updates``: where each sub-group is updated, so that the predicted update is shortest within a memory budget.

A bounded search over what the simulation says. It starts from the rules (all on the CPU, all streamed, the paper's
strides, the share that the lower bound names) and moves the number of streamed sub-groups up and down as long as that
helps, in ever smaller steps; with few sub-groups it looks at every placement that the bound does not rule out.
Deterministic: the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

from perf_model.action import ActionKind
from perf_model.bounds import Bound, work_bound, work_s
from perf_model.cost import CostModel
from perf_model.placement import Placement, place_all, place_by_fraction, place_by_stride
from perf_model.plan import UpdatePlan
from perf_model.schedule import STAGED_BYTES_PER_PARAM
from perf_model.simulate import Simulator
from perf_model.workload import SubGroup, Workload

MAX_SLOTS = 4
"""More never helped: a slot is filled, used and flushed, and one is spare."""

EXHAUSTIVE_UP_TO = 10

STRIDES = (2, 3, 4, 5, 6, 8, 10)
"""The paper's rule, as its artifact was run."""


@dataclass(frozen=True, kw_only=True)
class PlannedUpdate:
    """``predicted_s`` is the simulated update; ``bound`` what no plan can beat."""

    plan: UpdatePlan
    predicted_s: float
    bound: Bound

    @property
    def ratio_to_bound(self) -> float:
        return self.predicted_s / self.bound.seconds if self.bound.seconds > 0 else 1.0


def plan_updates(workload: Workload, cost: CostModel, staging_bytes: int | None = None) -> PlannedUpdate:
    """The best plan found whose slots fit ``staging_bytes`` of accelerator memory (None: any).

    Raises ``ValueError`` for a workload without sub-groups.
    """
    if not workload.sub_groups:
        raise ValueError("A workload to plan for has at least one sub-group, found none.")
    search = _Search(workload, cost, staging_bytes)
    search.try_all(_rules(workload, cost))
    search.climb()
    if len(workload.sub_groups) <= EXHAUSTIVE_UP_TO:
        search.try_all(product(Placement, repeat=len(workload.sub_groups)), fewer_slots_too=True)
    search.spare_slots()
    return PlannedUpdate(plan=search.best, predicted_s=search.best_s, bound=work_bound(workload.numel, cost))


def _rules(workload: Workload, cost: CostModel) -> Iterator[tuple[Placement, ...]]:
    yield place_all(workload, Placement.CPU)
    yield place_all(workload, Placement.STREAMED)
    yield place_by_fraction(workload, work_bound(workload.numel, cost).streamed_fraction)
    for stride in STRIDES:
        yield place_by_stride(workload, stride)


class _Search:
    def __init__(self, workload: Workload, cost: CostModel, staging_bytes: int | None) -> None:
        self._workload = workload
        self._cost = cost
        self._simulator = Simulator(cost)
        self._staging_bytes = staging_bytes
        self._tried: set[tuple[tuple[Placement, ...], int]] = set()
        self.best = UpdatePlan(workload=workload, placements=place_all(workload, Placement.CPU), num_slots=1)
        self.best_s = self._simulated_s(self.best)

    def try_all(self, candidates: Iterable[tuple[Placement, ...]], fewer_slots_too: bool = False) -> None:
        """The most promising first: when one cannot beat the best any more, none of the others can.

        More slots overlap more; now and then fewer are better, where transfers slow the CPU.
        """
        bounded = ((self._at_least_s(placements), placements) for placements in candidates)
        for at_least_s, placements in sorted(bounded, key=itemgetter(0)):
            if at_least_s >= self.best_s:
                return
            most = self._most_slots(placements)
            for num_slots in range(1 if fewer_slots_too else max(1, most), most + 1):
                self._try(placements, num_slots)

    def climb(self) -> None:
        """Streams more or fewer sub-groups, spread evenly, in steps that are halved when neither helps.

        The last step is one sub-group, or half a percent of them.
        """
        count = len(self._workload.sub_groups)
        streamed = self.best.placements.count(Placement.STREAMED)
        step = max(1, count // 8)
        while step > count // 200:
            before_s = self.best_s
            for other in (streamed + step, streamed - step):
                if 0 <= other <= count:
                    self.try_all([place_by_fraction(self._workload, other / count)])
            if self.best_s < before_s:
                streamed = self.best.placements.count(Placement.STREAMED)
            else:
                step //= 2

    def spare_slots(self) -> None:
        """Fewer slots where more do not help: they are memory."""
        for num_slots in range(1, self.best.num_slots):
            plan = UpdatePlan(workload=self._workload, placements=self.best.placements, num_slots=num_slots)
            predicted_s = self._simulated_s(plan)
            if predicted_s <= self.best_s:
                self.best, self.best_s = plan, predicted_s
                return

    def _try(self, placements: tuple[Placement, ...], num_slots: int) -> None:
        if (placements, num_slots) in self._tried:
            return
        self._tried.add((placements, num_slots))
        plan = UpdatePlan(workload=self._workload, placements=placements, num_slots=num_slots)
        predicted_s = self._simulated_s(plan)
        if predicted_s < self.best_s:
            self.best, self.best_s = plan, predicted_s

    def _most_slots(self, placements: tuple[Placement, ...]) -> int:
        """0 where the largest streamed sub-group does not fit."""
        sizes = [its.numel for its, placed in self._placed(placements) if placed is Placement.STREAMED]
        if not sizes:
            return 1
        slot_bytes = max(sizes) * STAGED_BYTES_PER_PARAM
        fitting = MAX_SLOTS if self._staging_bytes is None else self._staging_bytes // slot_bytes
        return min(MAX_SLOTS, len(sizes), fitting)

    def _at_least_s(self, placements: tuple[Placement, ...]) -> float:
        """What no order of the actions can beat: the work, and what comes before the first flush or after the last."""
        sizes: dict[Placement, list[int]] = {placement: [] for placement in Placement}
        for sub_group, placed in self._placed(placements):
            sizes[placed].append(sub_group.numel)
        load = self._simulator.load
        chains_s = [work_s(self._workload.numel, sum(sizes[Placement.STREAMED]), self._cost)]
        if streamed := sizes[Placement.STREAMED]:
            before_s = (
                load(ActionKind.PREFETCH, min(streamed)).alone_s + load(ActionKind.GPU_STEP, min(streamed)).alone_s
            )
            chains_s.append(before_s + sum(load(ActionKind.FLUSH_STATES, numel).alone_s for numel in streamed))
        if on_cpu := sizes[Placement.CPU]:
            after_s = load(ActionKind.PUBLISH, min(on_cpu)).alone_s
            chains_s.append(after_s + sum(load(ActionKind.CPU_STEP, numel).alone_s for numel in on_cpu))
        return max(chains_s)

    def _placed(self, placements: tuple[Placement, ...]) -> Iterable[tuple[SubGroup, Placement]]:
        return zip(self._workload.sub_groups, placements, strict=True)

    def _simulated_s(self, plan: UpdatePlan) -> float:
        return self._simulator.run(plan.schedule, plan.workload).makespan_s
