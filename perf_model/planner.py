"""Find the plan that lengthens the iteration least within the memory budgets.

As many units as fit are resident (R), those that forward uses first. Of the others, a share is updated on the CPU (c),
preferably those that forward needs late. The rest is streamed (S)::

    R R R R S S S c S c c c     4 residents, and half of the others on the CPU, late

A grid of such placements is simulated for units of medium size. Coordinate descent then changes one value at a time:
the unit size, the slots, the share on the CPU, how late it is, and the residents. If there is host memory for eager
units, those that backward completes first become eager, and the descent continues from the best shares of CPU units
and of streamed ones. Nothing depends on the clock or on chance, so that every rank finds the same plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, product
from typing import Any

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import Budgets, DoesNotFit, MemoryUse, TrainingSetup, memory_of, require_memory
from perf_model.prediction.overlap_windows import AddedTime, Windows
from perf_model.prediction.simulate import Simulator
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, in_forward_order
from perf_model.schedule.workload import Workload

UNIT_SIZES = tuple(10**6 * millions for millions in (5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000))

MAX_SLOTS = 4
"""One slot is filled, one is updated, one is flushed and one is free."""

SHARES = (*((tenth / 10, 1.0) for tenth in range(11)), (0.0, 0.0))
"""The shares on the CPU and of the residents that fit, which are simulated first."""

FIRST_STEP, LAST_STEP = 1 / 20, 1 / 250
"""The changes of a share. They are halved if a round gains less than ``LITTLE``."""

LITTLE = 0.001
"""A negligible gain, and the negligible added time as a share of forward."""

ALMOST_BEST = 1.005
"""Larger units, which have less overhead, are chosen if they add at most this multiple of the least time."""

GRID_UNITS, MAX_UNITS = 150, 600
"""The fewest units of the grid, and the most units of a size if a larger size fits."""

MAX_SIMULATED_UNITS = 15_000
"""The units of all simulated plans, at about 50 us each, after which the descent ends. Eager units count twice."""


@dataclass(frozen=True, kw_only=True)
class PlannedUpdate:
    """A plan and its prediction, with the unit size and the number of ``simulations`` if the planner found it."""

    plan: UpdatePlan
    timeline: Timeline
    added: AddedTime
    memory: MemoryUse
    unit_size: int = 0
    simulations: int = 0

    @property
    def exposed_s(self) -> float:
        return self.added.exposed_s

    @property
    def update_s(self) -> float:
        """Return the seconds of the update, exposed and hidden together."""
        return self.timeline.active_s

    def to_json_dict(self) -> dict[str, Any]:
        """Return the decisions of the planner, which ``PlanRequest.restore`` reads on another rank."""
        plan = self.plan
        return {
            "unit_size": self.unit_size,
            "num_slots": plan.num_slots,
            "placements": [placement.value for placement in plan.placements],
            "order": None if plan.order is None else list(plan.order),
            "eager": sorted(plan.eager),
            "fingerprint": plan.fingerprint,
        }


def evaluate(plan: UpdatePlan, cost: CostModel, windows: Windows, setup: TrainingSetup) -> PlannedUpdate:
    timeline = Simulator(cost, windows).run(plan.schedule, plan.workload)
    added = windows.added_time(timeline, plan.workload, cost)
    return PlannedUpdate(plan=plan, timeline=timeline, added=added, memory=memory_of(plan, setup))


def plan_units(
    workload_of: Callable[[int], Workload],
    sizes: Iterable[int],
    cost: CostModel,
    budgets: Budgets,
    windows: Windows,
    setup: TrainingSetup,
) -> PlannedUpdate:
    """Return the plan that adds the least time to an iteration, over the ``sizes`` that ``workload_of`` cuts units to.

    Raise ``DoesNotFit`` if none fits, ``ValueError`` if there are no units or the machine cannot update a fixed one.
    """
    cuts: dict[int, Workload] = {}
    errors: list[DoesNotFit] = []
    for unit_size in sorted(set(sizes), reverse=True):
        if any(cut.numel > MAX_UNITS * unit_size for cut in cuts.values()):
            break
        workload = workload_of(unit_size)
        if not workload.units:
            raise ValueError("A workload to plan for has at least one unit, found none.")
        try:
            require_memory(workload, cost.placements, budgets, setup)
        except DoesNotFit as error:
            errors.append(error)
            continue
        if not cuts or (workload not in cuts.values() and len(workload.units) <= MAX_UNITS):
            cuts[unit_size] = workload
    if not cuts:
        raise min(errors, key=lambda error: sum(error.missing.values()))
    search = _Search([*cuts.values()], cost, budgets, windows, setup)
    cut, plan = search.run()
    found = evaluate(plan, cost, windows, setup)
    return replace(found, unit_size=[*cuts][cut], simulations=search.simulations)


@dataclass(frozen=True)
class _Choice:
    """The values that determine a plan.

    ``cut`` is the index of the unit size. ``residents`` is a share of the units that fit as residents, and
    ``cpu_share`` is the CPU's share of the other parameters. After a share y of these, forward has passed ``y **
    cpu_power`` of the CPU's. ``eager`` and ``eager_streamed`` are the shares of the CPU's and of the streamed
    parameters that may be in eager units.
    """

    cut: int
    num_slots: int
    cpu_share: float
    residents: float
    cpu_power: float = 1.0
    eager: float = 0.0
    eager_streamed: float = 0.0


_Seconds = tuple[float, float, int]
"""The seconds that the iteration grows by, the seconds of the update and the number of slots: plans are compared so."""

_NEVER: _Seconds = (float("inf"), float("inf"), 0)


class _Search:
    """The plans that were simulated. ``cuts`` are ordered from the largest units to the smallest."""

    def __init__(
        self, cuts: list[Workload], cost: CostModel, budgets: Budgets, windows: Windows, setup: TrainingSetup
    ) -> None:
        self.simulations = 0
        self._simulated_units = 0
        self._cuts = cuts
        self._cost = cost
        self._budgets = budgets
        self._windows = windows
        self._setup = setup
        # For units that rules do not place, the planner counts the sums of all gradients on the accelerator.
        sums_on_host = setup.accumulates and setup.sums_on_accelerator is False
        self._placements = (Placement.CPU,) if sums_on_host else cost.placements
        self._simulator = Simulator(cost, windows)
        self._negligible_s = LITTLE * windows.forward_s
        self._plans: dict[_Choice, UpdatePlan | None] = {}
        self._known: dict[tuple[int, tuple[Placement, ...], int, frozenset[int]], _Seconds] = {}

    def run(self) -> tuple[int, UpdatePlan]:
        """Return the index of the best cut, and its plan."""
        units = [len(cut.units) for cut in self._cuts]
        cut = next((position for position, count in enumerate(units) if count >= GRID_UNITS), len(units) - 1)
        choices = [_Choice(cut, slots, *shares) for shares, slots in product(SHARES, range(1, MAX_SLOTS + 1))]
        # The plan with the least memory fits. With very many units, only every n-th of the others is simulated.
        nth = 1 + 2 * len(choices) * units[cut] // MAX_SIMULATED_UNITS
        best = min((_Choice(cut, 1, 1.0, 0.0), *choices[::nth]), key=self._seconds)
        names = [field.name for field in fields(_Choice)]
        best = self._descend(best, [name for name in names if not name.startswith("eager")])
        if self._budgets.eager_bytes > 0 and self._seconds(best)[0] > 2 * self._negligible_s:
            tenths = [tenth / 10 for tenth in range(1, 11)]
            shares = [(best.cpu_share, tenth) for tenth in tenths]
            # The CPU can update more than before, if backward hides that, and so can the GPU.
            shares += [(tenth, 1.0) for tenth in tenths if tenth > best.cpu_share]
            on_cpu = [replace(best, cpu_share=cpu, eager=share) for cpu, share in shares]
            pairs = product((0.0, 0.2, 0.4), tenths[1::2])
            through_slots = [replace(best, num_slots=3, cpu_share=cpu, eager_streamed=each) for cpu, each in pairs]
            least_s = self._seconds(best)[0] - self._negligible_s
            for choices in (through_slots, on_cpu):
                eager = min(choices, key=self._seconds)
                if self._seconds(eager)[0] < least_s:
                    self._simulated_units = MAX_SIMULATED_UNITS // 2
                    best = min(best, self._descend(eager, names), key=self._seconds)
        enough_s = max(ALMOST_BEST * self._seconds(best)[0], self._negligible_s)
        larger = (replace(best, cut=position) for position in range(best.cut))
        best = next((choice for choice in larger if self._seconds(choice)[0] <= enough_s), best)
        plan = self._plans[best]
        assert plan is not None, "the plan with the least memory fits"
        return best.cut, plan

    def _descend(self, best: _Choice, names: Sequence[str]) -> _Choice:
        """Return the choice to which changes of the fields ``names`` of ``best`` lead."""
        step = FIRST_STEP
        while step >= LAST_STEP and self._simulated_units < MAX_SIMULATED_UNITS:
            before_s = self._seconds(best)[0]
            if before_s <= self._negligible_s:
                break
            for name in names:
                if self._simulated_units < MAX_SIMULATED_UNITS:
                    best = min((best, *self._neighbours(best, name, step)), key=self._seconds)
            if self._seconds(best)[0] >= (1 - LITTLE) * before_s:
                step /= 2
        return best

    def _neighbours(self, choice: _Choice, name: str, step: float) -> Iterator[_Choice]:
        value = getattr(choice, name)
        factor = 1 + 12 * step  # of a power, 1.6 at first
        low, high, smaller, larger = {
            "cut": (0, len(self._cuts) - 1, value - 1, value + 1),
            "num_slots": (1, MAX_SLOTS, value - 1, value + 1),
            "cpu_power": (0.0, float("inf"), value / factor, value * factor),
        }.get(name, (0.0, 1.0, value - step, value + step))
        yield replace(choice, **{name: max(low, smaller)})
        yield replace(choice, **{name: min(high, larger)})

    def _seconds(self, choice: _Choice) -> _Seconds:
        if choice not in self._plans:
            self._plans[choice] = self._place(choice)
        plan = self._plans[choice]
        if plan is None:
            return _NEVER
        key = choice.cut, plan.placements, plan.num_slots, plan.eager
        if key not in self._known:
            self.simulations += 1
            self._simulated_units += len(plan.placements) + len(plan.eager)
            timeline = self._simulator.run(plan.schedule, plan.workload)
            added = self._windows.added_time(timeline, plan.workload, self._cost)
            self._known[key] = max(added.total_s, self._negligible_s), timeline.active_s, plan.num_slots
        return self._known[key]

    def _place(self, choice: _Choice) -> UpdatePlan | None:
        workload = self._cuts[choice.cut]
        free = [unit for unit in workload.in_order_of_use if unit.fixed is None]

        def plan_with(residents: int) -> UpdatePlan:
            placements = [unit.fixed or Placement.CPU for unit in workload.units]
            for unit in free[:residents]:
                placements[unit.index] = Placement.RESIDENT
            others = free[residents:] if Placement.STREAMED in self._placements else []
            total = sum(unit.numel for unit in others)
            passed = on_cpu = 0
            for unit in others:
                passed += unit.numel
                if on_cpu + unit.numel / 2 < choice.cpu_share * total * (passed / total) ** choice.cpu_power:
                    on_cpu += unit.numel
                else:
                    placements[unit.index] = Placement.STREAMED
            slots = max(1, min(choice.num_slots, placements.count(Placement.STREAMED)))
            plan = UpdatePlan(workload=workload, placements=tuple(placements), num_slots=slots)
            return self._with_eager_units(plan, choice)

        most = 0
        if Placement.RESIDENT in self._placements and choice.residents > 0:
            most = bisect_left(range(1, len(free) + 1), True, key=lambda count: not self._fits(plan_with(count)))
        plan = plan_with(round(choice.residents * most))
        return in_forward_order(plan, workload.first_use) if self._fits(plan) else None

    def _with_eager_units(self, plan: UpdatePlan, choice: _Choice) -> UpdatePlan:
        """Return ``plan`` with the units eager that backward completes first, as far as there is memory."""
        eager, left = set[int](), self._budgets.eager_numel(self._setup.widths)
        may_be_eager = self._setup.eligible_as_eager(plan)
        for placement, share in ((Placement.CPU, choice.eager), (Placement.STREAMED, choice.eager_streamed)):
            if share > 0.0:
                in_backward = reversed(plan.workload.in_order_of_use)
                placed = (unit for unit in in_backward if plan.placements[unit.index] is placement)
                eligible = [unit for unit in placed if unit.index in may_be_eager]
                passed = list(accumulate(unit.numel for unit in eligible))
                most = min(left, share * max(passed, default=0))
                chosen = [unit for unit, numel in zip(eligible, passed, strict=True) if numel <= most]
                eager |= {unit.index for unit in chosen}
                left -= sum(unit.numel for unit in chosen)
        return replace(plan, eager=frozenset(eager)) if eager else plan

    def _fits(self, plan: UpdatePlan) -> bool:
        return not self._budgets.missing(memory_of(plan, self._setup))
