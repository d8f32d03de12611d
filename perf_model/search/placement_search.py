"""Search for the best plan where forward hides nothing, or where there are few units.

The search follows these principles:

1. **Start from simple rules** (``starting_points.py``): all on the CPU, all streamed, every n-th streamed as in the
   paper, and the balanced share that the work bound suggests; with as many residents as fit next to the slots.
2. **Try the most promising first.** Candidates are sorted by their lower bounds (``pruning.py``). As soon as one of
   them cannot beat the best plan, none of those that follow can, and they are not simulated.
3. **Then move in small steps.** A local search streams a few units more or fewer, as long as that helps.
4. **Few units are searched exhaustively**, up to ``EXHAUSTIVE_UP_TO`` of them, except for the placements that
   their lower bounds rule out.
5. **Give back memory.** Slots that do not shorten the update are dropped.

For example, with two residents (R), streamed units (S) and the rest on the CPU (c)::

    unit                     0 1 2 3 4 5 6 7 8 9
    starting point, 3 streamed    R R c S c c S c S c
    local search, 4 streamed      R R c S c S c S c S
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.order import longest_in_the_middle
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets
from perf_model.search.pruning import MemoryLowerBounds, TimeLowerBounds, placement_masks
from perf_model.search.spread import Spread
from perf_model.search.starting_points import MAX_SLOTS, Placements, StartingPoints

EXHAUSTIVE_UP_TO = 10
"""The largest number of units of which all placements are candidates."""


class PlacementSearch:
    """The best plan so far, and the steps that look for a better one. ``simulated`` counts the plans simulated."""

    def __init__(
        self, workload: Workload, cost: CostModel, budgets: Budgets, windows: Windows, setup: TrainingSetup
    ) -> None:
        self.simulated = 0
        self._workload = workload
        self._numels = [unit.numel for unit in workload.units]
        self._cost = cost
        self._budgets = budgets
        self._windows = windows
        self._setup = setup
        self._simulator = Simulator(cost, windows)
        self._time_bounds = TimeLowerBounds(workload, cost, windows)
        self._memory_bounds = MemoryLowerBounds(workload, setup)
        self._tried: set[tuple[object, int]] = set()
        self._best: UpdatePlan | None = None
        self._best_s = (float("inf"), float("inf"))

    def run(self) -> UpdatePlan:
        """Return the best plan found."""
        starting_points = StartingPoints(self._workload, self._cost, self._budgets, self._setup)
        self.try_all(starting_points.placements())
        self.local_search()
        if len(self._numels) <= EXHAUSTIVE_UP_TO:
            self.try_all(product(*starting_points.possible()), try_fewer_slots=True)
        self.drop_unneeded_slots()
        return self.best

    @property
    def best(self) -> UpdatePlan:
        """Return the best plan so far."""
        assert self._best is not None, "the plan with the least memory fits"
        return self._best

    def try_all(self, candidates: Iterable[Placements], try_fewer_slots: bool = False) -> None:
        """Try the candidates, the most promising first, until the next one cannot beat the best plan.

        A candidate gets as many slots as fit, because more slots overlap more. With ``try_fewer_slots``, all smaller
        numbers are tried, too: sometimes they are better, because concurrent transfers slow the CPU.
        """
        distinct = list({self._equivalence_key(placements): placements for placements in candidates}.values())
        masks = placement_masks(distinct)
        allowed_bytes = np.inf if self._budgets.gpu_bytes is None else self._budgets.gpu_bytes
        fits = self._memory_bounds.gpu_bytes(masks) <= allowed_bytes
        least_s = np.where(fits, self._time_bounds.exposed_s(masks, MAX_SLOTS), np.inf)
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

    def local_search(self) -> None:
        """Stream more or fewer units, spread evenly, as long as that helps.

        A step that helps is doubled, and a step that does not help is halved. The last step is one unit, or half a
        percent of all units.
        """
        count = len(self._numels)
        step = max(1, count // 64)
        while self._best is not None and Placement.STREAMED in self._cost.placements and step > count // 200:
            before_s = self._best_s
            spread = Spread.from_plan(self._best)
            possible = len(spread.streamable)
            streamed = sum(self._best.placements[index] is Placement.STREAMED for index in spread.streamable)
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
        if self._budgets.missing(memory_of(plan, self._setup)):
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
        """Yield the orders to simulate; None is the order in which forward needs the units.

        Where forward hides much of the update, its own order is better, so with many units the other order is not
        tried then.
        """
        yield None
        few = len(self._numels) <= EXHAUSTIVE_UP_TO
        if (self._windows.forward_s == 0.0 or few) and (len(set(self._numels)) > 1 or Placement.RESIDENT in placements):
            yield longest_in_the_middle(self._workload, placements)

    def _seconds(self, plan: UpdatePlan) -> tuple[float, float]:
        """Return the seconds to minimise: the exposed time first, then the time of the update."""
        self.simulated += 1
        timeline = self._simulator.run(plan.schedule, plan.workload)
        return self._windows.exposed_s(timeline, plan.workload, self._cost), timeline.active_s

    def _equivalence_key(self, placements: Placements) -> object:
        """Return a key such that placements with equal keys have equal predicted time.

        Without a forward window it does not matter which of several equal units has a placement, only in which
        order the lengths with each placement come. For example, for lengths 5, 5 and 7, (STREAMED, CPU, CPU) and (CPU,
        STREAMED, CPU) have the same key: 5 is streamed, and 5 and 7 are on the CPU. In a forward window they differ,
        because forward needs the first unit first.
        """
        if self._windows.forward_s > 0.0:
            return placements
        pairs = list(zip(self._numels, placements, strict=True))
        return tuple(tuple(numel for numel, placed in pairs if placed is placement) for placement in Placement)
