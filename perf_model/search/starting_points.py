"""Make the placements that the search starts from: simple rules, each with as many residents as fit in GPU memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import (
    cuda_bytes_of,
    gradients_on_accelerator,
    resident_bytes_of,
    states_on_accelerator,
)
from perf_model.schedule.placement import Placement, place_all, place_by_fraction, place_by_stride
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import ResidentCapacity, work_bound
from perf_model.search.budgets import Budgets
from perf_model.search.spread import Spread

MAX_SLOTS = 4
"""The largest number of slots to try. More never helped: one is filled, one is updated, one is flushed, one is free."""

STRIDES = (2, 3, 4, 5, 6, 8, 10)
"""The strides of the paper's rule, as its artifact was run: every n-th sub-group is streamed."""

Placements = tuple[Placement, ...]


class StartingPoints:
    """The placements that the search starts from, for one workload on one machine."""

    def __init__(self, workload: Workload, cost: CostModel, budgets: Budgets, param_bytes: int) -> None:
        self._workload = workload
        self._numels = [sub_group.numel for sub_group in workload.sub_groups]
        self._cost = cost
        self._budgets = budgets
        self._gradients = gradients_on_accelerator(self._numels, param_bytes)

    def placements(self) -> Iterator[Placements]:
        """Yield the placements; some may be equal, and some may not fit the budgets of host and pinned memory."""
        yield place_all(self._workload, Placement.CPU)
        if Placement.RESIDENT in self._cost.placements:
            yield self._spread(self._first_residents(0, 0), largest=0).place(0.0)
        if Placement.STREAMED in self._cost.placements:
            everything = self._spread((), max(self._numels))
            for spread in dict.fromkeys((everything, *self._spreads())):
                yield spread.place(1.0)
                yield spread.place(spread.balanced_fraction(self._cost))
            capacity = ResidentCapacity.from_gpu_bytes(self._workload, self._budgets.gpu_bytes)
            shares = work_bound(self._workload.numel, self._cost, capacity).shares
            yield place_by_fraction(self._workload, shares.streamed)
            for stride in STRIDES:
                yield place_by_stride(self._workload, stride)

    @property
    def possible(self) -> Placements:
        """Return the placements that at least the smallest sub-group can have within the budget of GPU memory."""
        smallest = [min(self._numels)]
        fits = {
            Placement.CPU: True,
            Placement.STREAMED: self._fit(smallest, 1, []),
            Placement.RESIDENT: self._fit([], 1, smallest),
        }
        return tuple(placement for placement in self._cost.placements if fits[placement])

    def _spreads(self) -> Iterator[Spread]:
        """Yield families of placements with as many residents as fit next to two slots, and next to ``MAX_SLOTS``.

        The residents are the first sub-groups or the longest ones. Slots are long enough for every sub-group, or only
        for those that are needed to stream the share that the work bound streams.

        For example, let GPU memory hold the gradients and the states of 6 of 10 equal sub-groups. Next to 2 slots, 4 of
        them can be resident (R), and next to 4 slots, 2 of them; the others may be streamed (-)::

            R R R R - - - - - -     2 slots
            R R - - - - - - - -     4 slots
        """
        sizes = sorted(set(self._numels))
        to_stream = work_bound(self._workload.numel, self._cost).shares.streamed * self._workload.numel
        needed = next(size for size in sizes if sum(numel for numel in self._numels if numel <= size) >= to_stream)
        for num_slots in (2, MAX_SLOTS):
            fits = bisect_left(sizes, True, key=partial(self._too_long, num_slots))
            # Slots for every sub-group that fits, or slots that are no longer than needed.
            for largest in sorted({min(size, sizes[fits - 1]) for size in (needed, sizes[-1])}) if fits else ():
                yield self._spread(self._first_residents(num_slots, largest), largest)
            yield from self._longest_resident(num_slots)

    def _spread(self, residents: Iterable[int], largest: int) -> Spread:
        return Spread(workload=self._workload, residents=tuple(residents), largest=largest)

    def _first_residents(self, num_slots: int, largest: int) -> range:
        """Return as many of the first sub-groups as can be resident next to ``num_slots`` slots of ``largest``.

        Forward needs the first sub-groups first, and residents are updated without waiting for a prefetch.

        For example, let GPU memory hold the gradients and 900 M parameters of states. Of sub-groups of 100, 200, 300
        and 400 M parameters, the first two (300 M) can be resident next to 2 slots of 300 M: the result is
        ``range(0, 2)``. With the third one, 600 M and 600 M would be needed.
        """
        return range(
            bisect_left(
                range(1, len(self._numels) + 1),
                True,
                key=lambda count: not self._fit([largest] * num_slots, max(1, num_slots), self._numels[:count]),
            )
        )

    def _longest_resident(self, num_slots: int) -> Iterator[Spread]:
        """Yield the family with the longest sub-groups resident, as many as fit next to slots for the next longest.

        A slot is as long as the longest streamed sub-group. If the longest sub-groups are resident, slots are shorter,
        and more sub-groups can be resident.

        For example, let GPU memory hold the gradients and 1,000 M parameters of states. Let there be 9 sub-groups of
        100 M parameters and, at the end, one of 400 M. Next to 2 slots for the long one (800 M), two short sub-groups
        (200 M) can be resident. With the long one resident (400 M), 2 slots take 200 M, and four short sub-groups can
        be resident as well.
        """
        allowed = self._budgets.gpu_bytes
        if allowed is None or len(set(self._numels)) == 1:
            return
        by_length = sorted(range(len(self._numels)), key=lambda index: -self._numels[index])
        numels = [self._numels[index] for index in by_length]
        each_bytes = list(map(resident_bytes_of, numels))
        gradients_bytes = sum(reservation.count * reservation.each_bytes for reservation in self._gradients)
        residents_bytes = list(accumulate(each_bytes, initial=gradients_bytes))
        at_least = [
            sum_bytes + num_slots * slot_bytes
            for sum_bytes, slot_bytes in zip(residents_bytes[:-1], each_bytes, strict=True)
        ]
        counts = (count for count in reversed(range(len(numels))) if at_least[count] <= allowed)
        # The allocator may take more than ``at_least``, so the largest counts may not fit. A few less hardly ever fail.
        for count in islice(counts, 8):
            if self._fit([numels[count]] * num_slots, num_slots, numels[:count]):
                yield self._spread(sorted(by_length[:count]), numels[count])
                return

    def _too_long(self, num_slots: int, size: int) -> bool:
        return not self._fit([size] * num_slots, num_slots, [])

    def _fit(self, streamed: Sequence[int], num_slots: int, residents: Sequence[int]) -> bool:
        """Return whether residents and slots for streamed sub-groups of these lengths fit in GPU memory."""
        allowed = self._budgets.gpu_bytes
        if allowed is None:
            return True
        states = states_on_accelerator(streamed, residents, num_slots)
        return cuda_bytes_of([*states, *self._gradients]) <= allowed
