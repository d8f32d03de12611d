"""Choose a placement per sub-group that minimises exposed update time within the memory budgets.

``plan_updates`` searches for given sub-groups, and ``plan_sub_groups`` also chooses their size. The search follows
these principles:

1. **The simulation decides.** The best plan is the one with the least simulated exposed time. Of plans that expose
   equally little, it is the one with the least update time, exposed and hidden together.
2. **Start from simple rules** (``starting_points.py``): all on the CPU, all streamed, every n-th streamed as in the
   paper, and the balanced share that the work bound suggests; with as many residents as fit next to the slots.
3. **Try the most promising first.** Candidates are sorted by their lower bounds (``pruning.py``). As soon as one of
   them cannot beat the best plan, none of those that follow can, and they are not simulated.
4. **Then move in small steps.** A local search streams a few sub-groups more or fewer, as long as that helps.
5. **Few sub-groups are searched exhaustively**, up to ``EXHAUSTIVE_UP_TO`` of them, except for the placements that
   their lower bounds rule out.
6. **Give back memory.** Slots that do not shorten the update are dropped.
7. **Be deterministic.** Nothing depends on chance or on the clock, so every rank finds the same plan.

For example, with two residents (R), streamed sub-groups (S) and the rest on the CPU (c)::

    sub-group                     0 1 2 3 4 5 6 7 8 9
    starting point, 3 streamed    R R c S c c S c S c
    local search, 4 streamed      R R c S c S c S c S
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import MemoryUse, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.order import longest_in_the_middle
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import Bound, ResidentCapacity, exposed_bound, first_needed_bound, work_bound
from perf_model.search.budgets import Budgets, DoesNotFit
from perf_model.search.pruning import MemoryLowerBounds, TimeLowerBounds, placement_masks
from perf_model.search.spread import Spread
from perf_model.search.starting_points import MAX_SLOTS, Placements, StartingPoints

EXHAUSTIVE_UP_TO = 10
"""The largest number of sub-groups of which all placements are candidates."""

SUB_GROUP_SIZES = (
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
)
"""The sub-group sizes to choose from, in parameters; the last one is DeepSpeed's default."""

MAX_USEFUL_SUB_GROUPS = 1000
"""A size with more sub-groups is not tried if a larger size fits: each sub-group adds the latency of seven copies."""

NEGLIGIBLE_DIFFERENCE = 0.005
"""The relative difference up to which exposed times count as equal. Then smaller sub-groups gain nothing, and take more
pinned memory because of rounding."""


@dataclass(frozen=True, kw_only=True)
class PlannedUpdate:
    """A plan and its prediction.

    ``timeline`` is the simulated update, of which ``exposed_s`` seconds are exposed. No plan can beat the bounds:
    ``bound`` is of all the work, exposed and hidden together, and ``exposed_bound`` of the exposed time.
    """

    plan: UpdatePlan
    timeline: Timeline
    exposed_s: float
    memory: MemoryUse
    bound: Bound
    exposed_bound: Bound

    @property
    def update_s(self) -> float:
        """Return the seconds of the update, exposed and hidden together."""
        return self.timeline.active_s

    @property
    def ratio_to_bound(self) -> float:
        """Return the update time as a multiple of its lower bound."""
        return self.update_s / self.bound.seconds

    @property
    def ratio_to_exposed_bound(self) -> float:
        """Return the exposed time as a multiple of its lower bound."""
        return self.exposed_s / self.exposed_bound.seconds


def plan_sub_groups(
    workload_of: Callable[[int], Workload],
    sizes: Iterable[int],
    cost: CostModel,
    budgets: Budgets,
    windows: Windows,
    param_bytes: int,
) -> tuple[int, PlannedUpdate]:
    """Return the sub-group size, in parameters, that exposes the least time, and its plan.

    Of sizes whose exposed times differ negligibly, the largest is returned. ``workload_of`` maps a size to the
    sub-groups. Raise ``DoesNotFit`` if no plan fits with any size.
    """
    found: list[tuple[int, PlannedUpdate]] = []
    errors: list[DoesNotFit] = []
    for size in sorted(sizes, reverse=True):
        workload = workload_of(size)
        if found and len(workload.sub_groups) > MAX_USEFUL_SUB_GROUPS:
            continue
        try:
            found.append((size, plan_updates(workload, cost, budgets, windows, param_bytes)))
        except DoesNotFit as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: sum(error.missing.values()))
    enough_s = (1 + NEGLIGIBLE_DIFFERENCE) * min(planned.exposed_s for _, planned in found)
    return next(pair for pair in found if pair[1].exposed_s <= enough_s)


def plan_updates(
    workload: Workload,
    cost: CostModel,
    budgets: Budgets | None = None,
    windows: Windows | None = None,
    param_bytes: int = 2,
) -> PlannedUpdate:
    """Return the best plan found, with its prediction.

    ``budgets`` None means unlimited memory, and ``windows`` None means that nothing can be hidden. ``param_bytes`` is
    the width of a parameter of the model. Raise ``DoesNotFit`` if no plan fits, and ``ValueError`` for a workload
    without sub-groups.
    """
    if not workload.sub_groups:
        raise ValueError("A workload to plan for has at least one sub-group, found none.")
    starting_points = StartingPoints(workload, cost, budgets or Budgets(), param_bytes)
    search = _Search(workload, cost, budgets or Budgets(), windows or Windows(), param_bytes)
    search.try_all(starting_points.placements())
    search.local_search()
    if len(workload.sub_groups) <= EXHAUSTIVE_UP_TO and (possible := starting_points.possible):
        search.try_all(product(possible, repeat=len(workload.sub_groups)), try_fewer_slots=True)
    search.drop_unneeded_slots()
    return evaluate(search.best, cost, budgets or Budgets(), windows or Windows(), param_bytes)


def evaluate(plan: UpdatePlan, cost: CostModel, budgets: Budgets, windows: Windows, param_bytes: int) -> PlannedUpdate:
    """Return the prediction of ``plan``, which need not come from the planner."""
    timeline = Simulator(cost, windows).run(plan.schedule, plan.workload)
    workload, capacity = plan.workload, ResidentCapacity.from_gpu_bytes(plan.workload, budgets.gpu_bytes)
    exposed_bounds = (
        exposed_bound(workload.numel, cost, windows, capacity),
        first_needed_bound(workload, cost, windows, capacity),
    )
    return PlannedUpdate(
        plan=plan,
        timeline=timeline,
        exposed_s=windows.exposed_s(timeline, workload),
        memory=memory_of(plan, param_bytes),
        bound=work_bound(workload.numel, cost, capacity),
        exposed_bound=max(exposed_bounds, key=lambda bound: bound.seconds),
    )


class _Search:
    """The best plan so far, and the steps that look for a better one."""

    def __init__(
        self, workload: Workload, cost: CostModel, budgets: Budgets, windows: Windows, param_bytes: int
    ) -> None:
        self._workload = workload
        self._numels = [sub_group.numel for sub_group in workload.sub_groups]
        self._cost = cost
        self._budgets = budgets
        self._windows = windows
        self._param_bytes = param_bytes
        self._simulator = Simulator(cost, windows)
        self._time_bounds = TimeLowerBounds(workload, cost, windows)
        self._memory_bounds = MemoryLowerBounds(workload, param_bytes)
        self._tried: set[tuple[object, int]] = set()
        self._least_missing: dict[str, int] = {}
        self._best: UpdatePlan | None = None
        self._best_s = (float("inf"), float("inf"))

    @property
    def best(self) -> UpdatePlan:
        """Return the best plan so far. Raise ``DoesNotFit`` if no plan that was tried fits."""
        if self._best is None:
            raise DoesNotFit(self._least_missing)
        return self._best

    def try_all(self, candidates: Iterable[Placements], try_fewer_slots: bool = False) -> None:
        """Try the candidates, the most promising first, until the next one cannot beat the best plan.

        A candidate gets as many slots as fit, because more slots overlap more. With ``try_fewer_slots``, all smaller
        numbers are tried, too: sometimes they are better, because concurrent transfers slow the CPU.
        """
        distinct = list({self._equivalence_key(placements): placements for placements in candidates}.values())
        masks = placement_masks(distinct)
        missing_bytes = self._memory_bounds.missing_bytes(masks, self._budgets)
        least_s = np.where(missing_bytes == 0, self._time_bounds.exposed_s(masks, MAX_SLOTS), np.inf)
        for index in np.argsort(least_s, kind="stable").tolist():
            if least_s[index] >= self._best_s[0]:
                break
            placements = distinct[index]
            most = max(1, min(MAX_SLOTS, placements.count(Placement.STREAMED)))
            for num_slots in range(most, 0, -1):
                if self._time_bounds.exposed_s_with_slots(placements, num_slots) >= self._best_s[0]:
                    break
                if self._try(placements, num_slots) and not try_fewer_slots:
                    break
        if self._best is None:
            # Nothing fits so far. Try the candidate that exceeds the budgets the least, so that the error can name it.
            self._try(distinct[int(missing_bytes.argmin())], 1)

    def local_search(self) -> None:
        """Stream more or fewer sub-groups, spread evenly, as long as that helps.

        A step that helps is doubled, and a step that does not help is halved. The last step is one sub-group, or half a
        percent of all sub-groups.
        """
        count = len(self._numels)
        step = max(1, count // 64)
        while self._best is not None and Placement.STREAMED in self._cost.placements and step > count // 200:
            before_s = self._best_s
            spread = Spread.from_plan(self._best)
            streamed, possible = self._best.placements.count(Placement.STREAMED), len(spread.streamable)
            for other in (streamed + step, streamed - step):
                if 0 <= other <= possible and self._best_s == before_s:
                    self.try_all([spread.place(other / possible)])
            step = 2 * step if self._best_s < before_s else step // 2

    def drop_unneeded_slots(self) -> None:
        """Use fewer slots if that takes no longer, because slots take memory."""
        for num_slots in range(1, self.best.num_slots):
            plan = replace(self.best, num_slots=num_slots)
            at_least_s = self._time_bounds.exposed_s_with_slots(plan.placements, num_slots)
            if at_least_s <= self._best_s[0] and self._seconds(plan) <= self._best_s:
                self._best = plan
                return

    def _try(self, placements: Placements, num_slots: int) -> bool:
        """Simulate the plan in each order, keep it if it is the best one, and return whether it fits the budgets."""
        plan = UpdatePlan(workload=self._workload, placements=placements, num_slots=num_slots)
        if missing := self._budgets.missing(memory_of(plan, self._param_bytes)):
            if not self._least_missing or sum(missing.values()) < sum(self._least_missing.values()):
                self._least_missing = missing
            return False
        if (key := (self._equivalence_key(placements), num_slots)) not in self._tried:
            self._tried.add(key)
            for order in self._orders(placements):
                ordered = replace(plan, order=order)
                seconds = self._seconds(ordered)
                if seconds < self._best_s:
                    self._best, self._best_s = ordered, seconds
        return True

    def _orders(self, placements: Placements) -> Iterator[tuple[int, ...] | None]:
        """Yield the orders to simulate; None is the order in which forward needs the sub-groups.

        Where forward hides much of the update, its own order is better, so with many sub-groups the other order is not
        tried then.
        """
        yield None
        few = len(self._numels) <= EXHAUSTIVE_UP_TO
        if (self._windows.forward_s == 0.0 or few) and (len(set(self._numels)) > 1 or Placement.RESIDENT in placements):
            yield longest_in_the_middle(self._workload, placements)

    def _seconds(self, plan: UpdatePlan) -> tuple[float, float]:
        """Return the seconds to minimise: the exposed time first, then the time of the update."""
        timeline = self._simulator.run(plan.schedule, plan.workload)
        return self._windows.exposed_s(timeline, plan.workload), timeline.active_s

    def _equivalence_key(self, placements: Placements) -> object:
        """Return a key such that placements with equal keys have equal predicted time.

        Without a forward window it does not matter which of several equal sub-groups has a placement, only in which
        order the lengths with each placement come. For example, for lengths 5, 5 and 7, (STREAMED, CPU, CPU) and (CPU,
        STREAMED, CPU) have the same key: 5 is streamed, and 5 and 7 are on the CPU. In a forward window they differ,
        because forward needs the first sub-group first.
        """
        if self._windows.forward_s > 0.0:
            return placements
        pairs = list(zip(self._numels, placements, strict=True))
        return tuple(tuple(numel for numel, placed in pairs if placed is placement) for placement in Placement)
