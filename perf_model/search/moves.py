"""Draw small changes of a plan: moves of one unit, swaps of two, and changes of short blocks and of the slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from perf_model.prediction.lane_queues import Integers

MAX_BLOCK = 10
"""The most neighbouring units that one move changes."""

NEAR = 6
"""The distance up to which half of the swaps choose their second unit."""


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
    while count > 0:
        kind, place = random.random(), random.randrange(count)
        if kind < 0.3:
            yield Move(indices=(free[place],), codes=(random.choice(placements),))
        elif kind < 0.75:
            near = random.randrange(max(0, place - NEAR), min(count, place + NEAR + 1))
            index, other = free[place], free[near if kind < 0.5 else random.randrange(count)]
            yield Move(indices=(index, other), codes=(int(codes[other]), int(codes[index])))
        else:
            block = tuple(free[place : place + random.randint(2, MAX_BLOCK)])
            if kind < 0.9:
                yield Move(indices=block, codes=(random.choice(placements),) * len(block))
            else:
                shifted = np.roll(codes[list(block)], random.choice((-1, 1)))
                yield Move(indices=block, codes=tuple(shifted.tolist()))
