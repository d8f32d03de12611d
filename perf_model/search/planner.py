"""``plan_updates``: where each sub-group is updated, so that least of the update is seen within the memory budgets.

A bounded search over what the simulation says. It starts from the rules (all on the CPU, all streamed, the paper's
strides, the balanced share that the lower bound names), each with as many residents as fit beside its slots, and moves
the number of streamed sub-groups up and down as long as that helps, in ever smaller steps; with few sub-groups it looks
at every placement that the bound does not rule out. Deterministic: the same plan on every rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice, product

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import (
    Memory,
    cuda_bytes_of,
    gradients_on_accelerator,
    memory_of,
    resident_bytes_of,
    states_on_accelerator,
)
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.order import rising_and_falling
from perf_model.schedule.placement import Placement, place_all, place_by_fraction, place_by_stride
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import Bound, Room, exposed_bound, first_needed_bound, work_bound
from perf_model.search.budgets import Budgets, DoesNotFit
from perf_model.search.pruning import Floor, MemoryFloor, placed
from perf_model.search.spread import Spread

MAX_SLOTS = 4
"""More never helped: a slot is filled, used and flushed, and one is spare."""

EXHAUSTIVE_UP_TO = 10

STRIDES = (2, 3, 4, 5, 6, 8, 10)
"""The paper's rule, as its artifact was run."""

Placements = tuple[Placement, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedUpdate:
    """``timeline`` is the simulated update, of which ``exposed_s`` seconds are seen; no plan can beat the bounds.

    ``bound`` is of the work, exposed and hidden together; ``exposed_bound`` of what the windows cannot hide of it.
    """

    plan: UpdatePlan
    timeline: Timeline
    exposed_s: float
    memory: Memory
    bound: Bound
    exposed_bound: Bound

    @property
    def update_s(self) -> float:
        """Exposed and hidden together."""
        return self.timeline.active_s

    @property
    def ratio_to_bound(self) -> float:
        return self.update_s / self.bound.seconds

    @property
    def ratio_to_exposed_bound(self) -> float:
        return self.exposed_s / self.exposed_bound.seconds


def plan_updates(
    workload: Workload,
    cost: CostModel,
    budgets: Budgets | None = None,
    windows: Windows | None = None,
    param_bytes: int = 2,
) -> PlannedUpdate:
    """The plan found with the least exposed time that fits ``budgets`` (None: any memory), in ``windows`` (None: none).

    Raises ``DoesNotFit`` if no plan fits, ``ValueError`` for a workload without sub-groups.
    """
    if not workload.sub_groups:
        raise ValueError("A workload to plan for has at least one sub-group, found none.")
    search = _Search(workload, cost, budgets or Budgets(), windows or Windows(), param_bytes)
    search.try_all(search.rules())
    search.climb()
    if len(workload.sub_groups) <= EXHAUSTIVE_UP_TO and search.possible:
        search.try_all(product(search.possible, repeat=len(workload.sub_groups)), fewer_slots_too=True)
    search.spare_slots()
    return evaluate(search.best, cost, budgets or Budgets(), windows or Windows(), param_bytes)


def evaluate(plan: UpdatePlan, cost: CostModel, budgets: Budgets, windows: Windows, param_bytes: int) -> PlannedUpdate:
    """What is predicted of a plan, whoever made it."""
    timeline = Simulator(cost, windows).run(plan.schedule, plan.workload)
    workload, room = plan.workload, Room.of(plan.workload, budgets.gpu_bytes)
    exposed_bounds = (
        exposed_bound(workload.numel, cost, windows, room),
        first_needed_bound(workload, cost, windows, room),
    )
    return PlannedUpdate(
        plan=plan,
        timeline=timeline,
        exposed_s=windows.exposed_s(timeline, workload),
        memory=memory_of(plan, param_bytes),
        bound=work_bound(workload.numel, cost, room),
        exposed_bound=max(exposed_bounds, key=lambda bound: bound.seconds),
    )


class _Search:
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
        self._floor = Floor(workload, cost, windows)
        self._memory_floor = MemoryFloor(workload, param_bytes)
        self._gradients = gradients_on_accelerator(self._numels, param_bytes)
        self._tried: set[tuple[object, int]] = set()
        self._nearest: dict[str, int] = {}
        self._best: UpdatePlan | None = None
        self._best_s = (float("inf"), float("inf"))

    def rules(self) -> Iterator[Placements]:
        yield place_all(self._workload, Placement.CPU)
        if Placement.RESIDENT in self._cost.placements:
            yield self._spread(self._first_residents(0, 0), largest=0).place(0.0)
        if Placement.STREAMED in self._cost.placements:
            everything = self._spread((), max(self._numels))
            for spread in dict.fromkeys((everything, *self._spreads())):
                yield spread.place(1.0)
                yield spread.place(spread.balanced_fraction(self._cost))
            room = Room.of(self._workload, self._budgets.gpu_bytes)
            yield place_by_fraction(self._workload, work_bound(self._workload.numel, self._cost, room).mix.streamed)
            for stride in STRIDES:
                yield place_by_stride(self._workload, stride)

    def try_all(self, candidates: Iterable[Placements], fewer_slots_too: bool = False) -> None:
        """The most promising first: when one cannot beat the best any more, none of the others can.

        More slots overlap more; now and then fewer are better, where transfers slow the CPU.
        """
        unlike = list({self._alike(placements): placements for placements in candidates}.values())
        as_placed = placed(unlike)
        missing_bytes = self._memory_floor.missing_bytes(as_placed, self._budgets)
        least_s = np.where(missing_bytes == 0, self._floor.at_least_s(as_placed, MAX_SLOTS), np.inf)
        for index in np.argsort(least_s, kind="stable").tolist():
            if least_s[index] >= self._best_s[0]:
                break
            placements = unlike[index]
            most = max(1, min(MAX_SLOTS, placements.count(Placement.STREAMED)))
            for num_slots in range(most, 0, -1):
                if self._floor.in_slots_at_least_s(placements, num_slots) >= self._best_s[0]:
                    break
                if self._try(placements, num_slots) and not fewer_slots_too:
                    break
        if self._best is None:
            self._try(unlike[int(missing_bytes.argmin())], 1)

    def climb(self) -> None:
        """Streams more or fewer sub-groups, spread evenly, in steps that double while they help and halve when not.

        The last step is one sub-group, or half a percent of them.
        """
        count = len(self._numels)
        step = max(1, count // 64)
        while self._best is not None and Placement.STREAMED in self._cost.placements and step > count // 200:
            before_s = self._best_s
            spread = Spread.of(self._best)
            streamed, possible = self._best.placements.count(Placement.STREAMED), len(spread.streamable)
            for other in (streamed + step, streamed - step):
                if 0 <= other <= possible and self._best_s == before_s:
                    self.try_all([spread.place(other / possible)])
            step = 2 * step if self._best_s < before_s else step // 2

    def spare_slots(self) -> None:
        """Fewer slots where more do not help: they are memory."""
        for num_slots in range(1, self.best.num_slots):
            plan = replace(self.best, num_slots=num_slots)
            at_least_s = self._floor.in_slots_at_least_s(plan.placements, num_slots)
            if at_least_s <= self._best_s[0] and self._seconds(plan) <= self._best_s:
                self._best = plan
                return

    @property
    def possible(self) -> Placements:
        """What the accelerator's memory allows at least one sub-group to be."""
        smallest = [min(self._numels)]
        fits = {
            Placement.CPU: True,
            Placement.STREAMED: self._fit(smallest, 1, []),
            Placement.RESIDENT: self._fit([], 1, smallest),
        }
        return tuple(its for its in self._cost.placements if fits[its])

    @property
    def best(self) -> UpdatePlan:
        """Raises ``DoesNotFit``."""
        if self._best is None:
            raise DoesNotFit(self._nearest)
        return self._best

    def _try(self, placements: Placements, num_slots: int) -> bool:
        """Whether it fits."""
        plan = UpdatePlan(workload=self._workload, placements=placements, num_slots=num_slots)
        if missing := self._missing(plan):
            if not self._nearest or sum(missing.values()) < sum(self._nearest.values()):
                self._nearest = missing
            return False
        if (key := (self._alike(placements), num_slots)) not in self._tried:
            self._tried.add(key)
            for order in self._orders(placements):
                ordered = replace(plan, order=order)
                seconds = self._seconds(ordered)
                if seconds < self._best_s:
                    self._best, self._best_s = ordered, seconds
        return True

    def _orders(self, placements: Placements) -> Iterator[tuple[int, ...] | None]:
        """Where forward hides much, its own order is the better one; of many sub-groups the other is not tried then."""
        yield None
        few = len(self._numels) <= EXHAUSTIVE_UP_TO
        if (self._windows.forward_s == 0.0 or few) and (len(set(self._numels)) > 1 or Placement.RESIDENT in placements):
            yield rising_and_falling(self._workload, placements)

    def _missing(self, plan: UpdatePlan) -> dict[str, int]:
        return self._budgets.missing(memory_of(plan, self._param_bytes))

    def _seconds(self, plan: UpdatePlan) -> tuple[float, float]:
        """What is to be least: the exposed seconds; where two expose as little, the seconds of work."""
        timeline = self._simulator.run(plan.schedule, plan.workload)
        return self._windows.exposed_s(timeline, plan.workload), timeline.active_s

    def _alike(self, placements: Placements) -> object:
        """Equal for placements that take the same time: without a forward window only sizes and their order count."""
        if self._windows.forward_s > 0.0:
            return placements
        return tuple(self._sizes(placements).values())

    def _sizes(self, placements: Placements) -> dict[Placement, tuple[int, ...]]:
        pairs = list(zip(self._numels, placements, strict=True))
        return {its: tuple(numel for numel, placed in pairs if placed is its) for its in Placement}

    def _spreads(self) -> Iterator[Spread]:
        """With as many residents as fit beside few slots and many: the first, or the longest."""
        sizes = sorted(set(self._numels))
        to_stream = work_bound(self._workload.numel, self._cost).mix.streamed * self._workload.numel
        needed = next(size for size in sizes if sum(numel for numel in self._numels if numel <= size) >= to_stream)
        for num_slots in (2, MAX_SLOTS):
            fits = bisect_left(sizes, True, key=partial(self._too_long, num_slots))
            # Slots for any sub-group, or for no longer than needed.
            for largest in sorted({min(size, sizes[fits - 1]) for size in (needed, sizes[-1])}) if fits else ():
                yield self._spread(self._first_residents(num_slots, largest), largest)
            yield from self._beside_the_longest(num_slots)

    def _spread(self, residents: Iterable[int], largest: int) -> Spread:
        return Spread(workload=self._workload, residents=tuple(residents), largest=largest)

    def _first_residents(self, num_slots: int, largest: int) -> range:
        """Forward needs them first, and they are ready at once."""
        return range(
            bisect_left(
                range(1, len(self._numels) + 1),
                True,
                key=lambda count: not self._fit([largest] * num_slots, max(1, num_slots), self._numels[:count]),
            )
        )

    def _beside_the_longest(self, num_slots: int) -> Iterator[Spread]:
        """Slots are as long as the longest that is streamed: with those resident, more residents fit beside them."""
        allowed = self._budgets.gpu_bytes
        if allowed is None or len(set(self._numels)) == 1:
            return
        by_length = sorted(range(len(self._numels)), key=lambda index: -self._numels[index])
        numels = [self._numels[index] for index in by_length]
        each_bytes = list(map(resident_bytes_of, numels))
        gradients_bytes = sum(its.count * its.each_bytes for its in self._gradients)
        residents_bytes = list(accumulate(each_bytes, initial=gradients_bytes))
        at_least = [
            sum_bytes + num_slots * slot_bytes
            for sum_bytes, slot_bytes in zip(residents_bytes[:-1], each_bytes, strict=True)
        ]
        counts = (count for count in reversed(range(len(numels))) if at_least[count] <= allowed)
        # At least: the allocator may take more for so many, hardly for a few less.
        for count in islice(counts, 8):
            if self._fit([numels[count]] * num_slots, num_slots, numels[:count]):
                yield self._spread(sorted(by_length[:count]), numels[count])
                return

    def _too_long(self, num_slots: int, size: int) -> bool:
        return not self._fit([size] * num_slots, num_slots, [])

    def _fit(self, streamed: Sequence[int], num_slots: int, residents: Sequence[int]) -> bool:
        """Whether the accelerator has room for residents, and for slots for sub-groups, of these lengths."""
        allowed = self._budgets.gpu_bytes
        if allowed is None:
            return True
        states = states_on_accelerator(streamed, residents, num_slots)
        return cuda_bytes_of([*states, *self._gradients]) <= allowed


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
"""What is chosen from; DeepSpeed's default is the last."""

MOST_SUB_GROUPS = 1000
"""A size that makes more of them is not tried where a larger one fits: each costs a copy's latency seven times."""

ALIKE = 0.005
"""Exposed times as near as this are alike: smaller sub-groups gain nothing, for more rounding of pinned memory."""


def plan_sub_groups(
    workload_of: Callable[[int], Workload],
    sizes: Iterable[int],
    cost: CostModel,
    budgets: Budgets,
    windows: Windows,
    param_bytes: int,
) -> tuple[int, PlannedUpdate]:
    """The size, in parameters, and its plan that expose least; the largest of those that expose about as little.

    Raises ``DoesNotFit`` where no plan fits with any of them.
    """
    found: list[tuple[int, PlannedUpdate]] = []
    unfit: list[DoesNotFit] = []
    for size in sorted(sizes, reverse=True):
        workload = workload_of(size)
        if found and len(workload.sub_groups) > MOST_SUB_GROUPS:
            continue
        try:
            found.append((size, plan_updates(workload, cost, budgets, windows, param_bytes)))
        except DoesNotFit as error:
            unfit.append(error)
    if not found:
        raise min(unfit, key=lambda error: sum(error.missing.values()))
    enough_s = (1 + ALIKE) * min(planned.exposed_s for _, planned in found)
    return next(pair for pair in found if pair[1].exposed_s <= enough_s)
