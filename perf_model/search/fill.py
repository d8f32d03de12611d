"""Fill the GPU memory that a plan leaves: exchange units of different lengths, so that more parameters are resident.

Units are cut along layers, so their lengths differ a little. Rules that place units in order leave up to one unit of
memory, and the allocator rounds some lengths up by more than others. Where forward hides almost all the work, even a
tenth of a unit less on the CPU matters.

For example, let there be memory for 10 parameters. With two units of 4 resident (R), it leaves 2; after a pair of
exchanges with units of 5 on the CPU (c), it is full::

    R4 R4 c5 c5    c4 c4 R5 R5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from perf_model.prediction.lane_queues import CODES, Integers
from perf_model.prediction.memory import TrainingSetup, block_bytes_of, resident_bytes_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.memory_check import MemoryCheck

MAX_LENGTHS = 8
"""The most lengths of one placement that are exchanged, the most frequent ones."""

MAX_PAIRS = 16
"""The most pairs of exchanges in one plan."""

MAX_TRIED = 4
"""The most pairs whose memory is computed before one of them is made."""

NO_UNIT = 0
"""The length that stands for no unit."""

_RESIDENT = CODES[Placement.RESIDENT]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A unit of ``entering`` parameters becomes resident, and a resident one of ``leaving`` takes its placement.

    ``code`` is that placement. If only one of the two units changes, the other length is ``NO_UNIT``. ``more_bytes`` is
    the memory that is needed in addition, as far as it does not depend on other units.
    """

    code: int
    entering: int
    leaving: int
    more_bytes: int

    @property
    def more_numel(self) -> int:
        """Return the number of parameters that are resident in addition."""
        return self.entering - self.leaving

    def apply(self, codes: Integers, numels: Integers, free: Integers) -> Integers | None:
        """Return the placements after the exchange of the two nearest units; None if there is no such unit."""
        found = []
        for code, numel in ((self.code, self.entering), (_RESIDENT, self.leaving)):
            units = free[(codes[free] == code) & (numels[free] == numel)]
            if numel != NO_UNIT and not len(units):
                return None
            found.append(units)
        entering, leaving = found
        if len(entering) and len(leaving):
            distances = np.abs(entering[:, None] - leaving)
            nearest = np.unravel_index(distances.argmin(), distances.shape)
            entering, leaving = entering[nearest[0] :], leaving[nearest[1] :]
        exchanged = codes.copy()
        exchanged[entering[:1]], exchanged[leaving[:1]] = _RESIDENT, self.code
        return exchanged


class MemoryFiller:
    """Exchanges in the plans of one workload."""

    def __init__(self, workload: Workload, memory: MemoryCheck, setup: TrainingSetup) -> None:
        self._numels = np.array([unit.numel for unit in workload.units])
        self._memory = memory
        self._setup = setup
        self._known_bytes: dict[tuple[int, int], int] = {}

    def fill(self, codes: Integers, num_slots: int, free: Sequence[int]) -> Integers:
        """Return the placements after exchanges, two at a time, while more parameters become resident.

        Only the units ``free`` are exchanged.
        """
        units = np.array(free, dtype=np.int64)
        for _ in range(MAX_PAIRS):
            better = next(
                (tried for tried in self._after_two(codes, num_slots, units) if self._memory.fits(tried, num_slots)),
                None,
            )
            if better is None:
                break
            codes = better
        return codes

    def _after_two(self, codes: Integers, num_slots: int, free: Integers) -> Iterator[Integers]:
        """Yield the placements after the ``MAX_TRIED`` pairs of exchanges that add the most residents and seem to fit.

        ``more_bytes`` leaves out longer slots and shared segments, so not all of them fit.
        """
        left_bytes = -self._memory.excess_bytes(codes[None], np.array([num_slots]))[0]
        exchanges = list(self._exchanges(codes, free))
        more_numel = np.array([exchange.more_numel for exchange in exchanges])
        more_bytes = np.array([exchange.more_bytes for exchange in exchanges])
        fits = np.add.outer(more_bytes, more_bytes) <= left_bytes
        together = np.where(fits, np.add.outer(more_numel, more_numel), 0).ravel()
        more = np.flatnonzero(together > 0)
        for index in more[np.argsort(-together[more], kind="stable")[:MAX_TRIED]].tolist():
            pair = [exchanges[place] for place in divmod(index, len(exchanges))]
            first, second = sorted(pair, key=lambda exchange: -exchange.more_numel)
            exchanged = first.apply(codes, self._numels, free)
            if exchanged is not None:
                # If both need the same unit, the first one alone is still better.
                both = second.apply(exchanged, self._numels, free)
                yield exchanged if both is None else both

    def _exchanges(self, codes: Integers, free: Integers) -> Iterator[Exchange]:
        """Yield one exchange for each pair of lengths and each placement, and the one that changes nothing."""
        yield Exchange(code=_RESIDENT, entering=NO_UNIT, leaving=NO_UNIT, more_bytes=0)
        lengths = {
            code: [NO_UNIT, *_most_frequent(self._numels[free[codes[free] == code]].tolist())]
            for code in CODES.values()
        }
        for code in (CODES[Placement.CPU], CODES[Placement.STREAMED]):
            more_bytes = {numel: self._more_bytes(numel, code) for numel in {*lengths[code], *lengths[_RESIDENT]}}
            for entering, leaving in product(lengths[code], lengths[_RESIDENT]):
                if entering != leaving:
                    needed_bytes = more_bytes[entering] - more_bytes[leaving]
                    yield Exchange(code=code, entering=entering, leaving=leaving, more_bytes=needed_bytes)

    def _more_bytes(self, numel: int, code: int) -> int:
        """Return the bytes that a unit of ``numel`` takes more if it is resident than with the placement ``code``."""
        if (numel, code) not in self._known_bytes:
            kept = self._setup.accumulates or code == CODES[Placement.STREAMED]
            gradient_bytes = 0 if kept else block_bytes_of(numel * self._setup.widths.grad)
            states_bytes = resident_bytes_of(numel, self._setup.widths)
            self._known_bytes[numel, code] = states_bytes + gradient_bytes if numel != NO_UNIT else 0
        return self._known_bytes[numel, code]


def _most_frequent(numels: Sequence[int]) -> list[int]:
    return [numel for numel, _ in Counter(numels).most_common(MAX_LENGTHS)]
