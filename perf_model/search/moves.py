"""Draw changes of a plan: moves of one unit, swaps of two, and changes of blocks and of the slots.

The shift of a long block moves all work of a lane in it by one or two units. Swaps would need one for each unit of that
lane.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from random import Random

import numpy as np

from perf_model.prediction.lane_queues import Integers

MAX_BLOCK = 10
"""The most neighbouring units that one move gives the same placement."""

NEAR = 6
"""The number of units with another placement, on each side, from which a near swap chooses its second unit."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """New ``codes`` of the placements of the units in ``indices``, and the change of the number of slots."""

    indices: tuple[int, ...]
    codes: tuple[int, ...]
    more_slots: int = 0

    def apply(self, codes: Integers) -> Integers:
        """Return the placements after the move, given those before it."""
        moved = codes.copy()
        moved[list(self.indices)] = self.codes
        return moved


def draw_moves(codes: Integers, free: Sequence[int], placements: tuple[int, ...], random: Random) -> Iterator[Move]:
    """Yield moves of the units ``free`` without end, from a plan with placements ``codes``.

    Every new placement is among ``placements``. Neighbours are those among ``free``, which is in ascending order.
    """
    yield Move(indices=(), codes=(), more_slots=-1)
    yield Move(indices=(), codes=(), more_slots=1)
    count = len(free)
    units = np.array(free, dtype=np.int64)
    others = {code: np.flatnonzero(codes[units] != code).tolist() for code in placements}
    while count > 0:
        kind, place = random.random(), random.randrange(count)
        index = free[place]
        if kind < 0.3:
            yield Move(indices=(index,), codes=(random.choice(placements),))
        elif kind < 0.75:
            # Equal placements need no swap.
            different = others.get(int(codes[index]), [])
            if different:
                nearest = bisect_left(different, place)
                first, last = (max(0, nearest - NEAR), nearest + NEAR) if kind < 0.5 else (0, len(different))
                other = free[random.choice(different[first:last])]
                yield Move(indices=(index, other), codes=(int(codes[other]), int(codes[index])))
        elif kind < 0.82:
            block = tuple(free[place : place + random.randint(2, MAX_BLOCK)])
            yield Move(indices=block, codes=(random.choice(placements),) * len(block))
        else:
            # As many short blocks as long ones: the logarithm of the length is uniform.
            block = tuple(free[place : place + round(2 * (count / 2) ** random.random())])
            shifted = np.roll(codes[list(block)], random.choice((-2, -1, 1, 2)))
            yield Move(indices=block, codes=tuple(shifted.tolist()))


def apply_together(codes: Integers, moves: Sequence[Move]) -> list[Integers]:
    """Return the placements after the first two moves, the first three, and so on.

    Moves that would interfere with an earlier one, or change the slots, are left out.
    """
    taken: set[int] = set()
    apart = []
    for move in moves:
        if move.more_slots == 0 and taken.isdisjoint(move.indices):
            taken.update(move.indices)
            apart.append(move)
    placements = accumulate(apart, lambda before, move: move.apply(before), initial=codes)
    return list(islice(placements, 2, None))
