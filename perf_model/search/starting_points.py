"""Make the placements that the search starts from: simple rules, each with as many residents as fit in GPU memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import (
    TrainingSetup,
    cuda_bytes_of,
    gradients_on_accelerator,
    on_accelerator,
    resident_bytes_of,
    rounding_buffer,
    states_on_accelerator,
)
from perf_model.schedule.placement import Placement
from perf_model.schedule.simple_placements import keep_fixed, place_all, place_by_fraction, place_by_stride
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import work_bound
from perf_model.search.budgets import Budgets
from perf_model.search.capacity import ResidentCapacity
from perf_model.search.spread import Spread

MAX_SLOTS = 4
"""The largest number of slots to try: one is filled, one is updated, one is flushed, one is free.

More slots help only where residents leave memory for them (``benchmarks/slots``).
"""

STRIDES = (2, 3, 4, 5, 6, 8, 10)
"""The strides of the paper's rule, as its artifact was run: every n-th unit is streamed."""

Placements = tuple[Placement, ...]


class StartingPoints:
    """The placements that the search starts from, for one workload on one machine."""

    def __init__(self, workload: Workload, cost: CostModel, budgets: Budgets, setup: TrainingSetup) -> None:
        self._workload = workload
        self._numels = [unit.numel for unit in workload.units]
        self._every = Counter(self._numels)
        self._cost = cost
        self._budgets = budgets
        self._setup = setup
        self._free = [unit.index for unit in workload.units if unit.fixed is None]
        self._fixed_streamed, self._fixed_residents = (
            [unit.numel for unit in workload.units if unit.fixed is placement]
            for placement in (Placement.STREAMED, Placement.RESIDENT)
        )
        capacity = ResidentCapacity.from_gpu_bytes(workload, budgets.gpu_bytes, setup)
        self._shares = work_bound(workload.numel, cost, capacity).shares

    def placements(self) -> Iterator[Placements]:
        """Yield the placements; some may be equal, and some may not fit in GPU memory. Fixed units keep theirs."""
        return (keep_fixed(self._workload, placements) for placements in self._rules())

    def _rules(self) -> Iterator[Placements]:
        yield place_all(self._workload, Placement.CPU)
        if Placement.RESIDENT in self._cost.placements:
            yield self._spread(self._first_residents(0, 0), largest=0).place(0.0)
        if Placement.STREAMED in self._cost.placements:
            everything = self._spread((), max(self._numels))
            for spread in dict.fromkeys((everything, *self._spreads())):
                yield spread.place(1.0)
                yield spread.place(min(spread.balanced_fraction(self._cost), self._fraction_that_fits(spread)))
            yield place_by_fraction(self._workload, self._shares.streamed)
            for stride in STRIDES:
                yield place_by_stride(self._workload, stride)

    def possible(self) -> list[Placements]:
        """Return the placements that each unit may have.

        Those that not even the smallest unit can have within GPU memory are left out.
        """
        nothing: Counter[int] = Counter()
        smallest = Counter([min(self._numels)])
        others = Counter(self._numels) - smallest
        alone = {
            Placement.CPU: [],
            Placement.STREAMED: on_accelerator(smallest, nothing, others, 1, self._setup),
            Placement.RESIDENT: on_accelerator(nothing, smallest, others, 1, self._setup),
        }
        allowed = self._budgets.gpu_bytes
        of_smallest = tuple(
            placement
            for placement in self._cost.placements
            if allowed is None or cuda_bytes_of(alone[placement]) <= allowed
        )
        return [of_smallest if unit.fixed is None else (unit.fixed,) for unit in self._workload.units]

    def _spreads(self) -> Iterator[Spread]:
        """Yield families of placements with as many residents as fit next to two slots, and next to ``MAX_SLOTS``.

        The residents are the first units or the longest ones. Slots are long enough for every unit, or only
        for those that are needed to stream the share that the work bound streams.

        For example, let GPU memory hold the gradients and the states of 6 of 10 equal units. Next to 2 slots, 4 of
        them can be resident (R), and next to 4 slots, 2 of them; the others may be streamed (-)::

            R R R R - - - - - -     2 slots
            R R - - - - - - - -     4 slots
        """
        sizes = sorted(set(self._numels))
        to_stream = work_bound(self._workload.numel, self._cost).shares.streamed * self._workload.numel
        needed = next(size for size in sizes if sum(numel for numel in self._numels if numel <= size) >= to_stream)
        for num_slots in (2, MAX_SLOTS):
            fits = bisect_left(sizes, True, key=partial(self._too_long, num_slots))
            # Slots for every unit that fits, or slots that are no longer than needed.
            for largest in sorted({min(size, sizes[fits - 1]) for size in (needed, sizes[-1])}) if fits else ():
                yield self._spread(self._first_residents(num_slots, largest), largest)
            yield from self._longest_resident(num_slots)

    def _spread(self, residents: Iterable[int], largest: int) -> Spread:
        return Spread(workload=self._workload, residents=tuple(residents), largest=largest)

    def _first_residents(self, num_slots: int, largest: int) -> list[int]:
        """Return as many of the first units as can be resident next to ``num_slots`` slots of ``largest``.

        Forward needs the first units first, and residents are updated without waiting for a prefetch.

        For example, let GPU memory hold the gradients and 900 M parameters of states. Of units of 100, 200, 300
        and 400 M parameters, the first two (300 M) can be resident next to 2 slots of 300 M: the result is
        ``[0, 1]``. With the third one, 600 M and 600 M would be needed.
        """
        numels = [self._numels[index] for index in self._free]
        count = bisect_left(
            range(1, len(numels) + 1),
            True,
            key=lambda count: not self._fit([largest] * num_slots, num_slots, numels[:count]),
        )
        return self._free[:count]

    def _longest_resident(self, num_slots: int) -> Iterator[Spread]:
        """Yield the family with the longest units resident, as many as fit next to slots for the next longest.

        A slot is as long as the longest streamed unit. If the longest units are resident, slots are shorter,
        and more units can be resident.

        For example, let GPU memory hold the gradients and 1,000 M parameters of states. Let there be 9 units of
        100 M parameters and, at the end, one of 400 M. Next to 2 slots for the long one (800 M), two short units
        (200 M) can be resident. With the long one resident (400 M), 2 slots take 200 M, and four short units can
        be resident as well.
        """
        allowed = self._budgets.gpu_bytes
        if allowed is None or len(set(self._numels)) == 1:
            return
        by_length = sorted(self._free, key=lambda index: -self._numels[index])
        numels = [self._numels[index] for index in by_length]
        states_bytes = [resident_bytes_of(numel, self._setup.widths) for numel in numels]
        residents_bytes = accumulate(states_bytes, initial=0)
        at_least = [
            sum_bytes + num_slots * slot_bytes
            for sum_bytes, slot_bytes in zip(residents_bytes, states_bytes, strict=False)
        ]
        counts = (count for count in reversed(range(len(numels))) if at_least[count] <= allowed)
        # Gradients and the allocator take more than ``at_least``, so the largest counts may not fit.
        for count in islice(counts, max(8, len(numels) // 4)):
            if self._fit([numels[count]] * num_slots, num_slots, numels[:count]):
                yield self._spread(sorted(by_length[:count]), numels[count])
                return

    def _fraction_that_fits(self, spread: Spread) -> float:
        """Return the fraction of ``spread`` whose gradients fit next to its residents and two slots."""
        streamable = sum(self._numels[index] for index in spread.streamable)
        if self._budgets.gpu_bytes is None or self._setup.accumulates or streamable == 0:
            return 1.0
        residents = Counter(self._numels[index] for index in spread.residents)
        states = on_accelerator(Counter({spread.largest: 2}), residents, Counter(), 2, self._setup)
        free_bytes = self._budgets.gpu_bytes - cuda_bytes_of(states)
        return min(1.0, max(0.0, free_bytes / (self._setup.widths.grad * streamable)))

    def _too_long(self, num_slots: int, size: int) -> bool:
        return not self._fit([size] * num_slots, num_slots, [])

    def _fit(self, slots: Sequence[int], num_slots: int, residents: Sequence[int]) -> bool:
        """Return whether residents of these lengths, slots, fixed units and gradients fit in GPU memory.

        Without accumulation, gradients are counted for the share of the parameters that the work bound streams.
        """
        allowed = self._budgets.gpu_bytes
        if allowed is None:
            return True
        streamed = Counter([*slots, *self._fixed_streamed])
        resident = Counter([*residents, *self._fixed_residents])
        taken_bytes = cuda_bytes_of(
            [
                *states_on_accelerator(streamed, resident, max(1, num_slots), self._setup.widths),
                *gradients_on_accelerator(
                    self._every if self._setup.accumulates else resident, self._setup.widths.grad
                ),
                *rounding_buffer(max(streamed | resident, default=0), self._setup),
            ]
        )
        if slots and not self._setup.accumulates:
            taken_bytes += int(self._shares.streamed * self._workload.numel * self._setup.widths.grad)
        return taken_bytes <= allowed
