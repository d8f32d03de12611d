"""Make placements that change gradually over the order in which forward needs the units.

Forward needs the first units first and waits for the last ones last. So residents, which are updated at once, are
worth more at the beginning, and a unit that the CPU updates slowly costs less at the end. Slots, residents and the
CPU's share depend on one another: one slot less is memory for more residents. ``ramps`` therefore combines a few values
of each, and the simulation decides.

For example, with a third of the units resident (R) and a quarter of the others on the CPU (c)::

    residents spread, CPU spread    S R c S R S S R c S R S
    residents first, CPU late       R R R R S S S S S c S c
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp
from random import Random

import numpy as np

from perf_model.prediction.lane_queues import CODES, Integers
from perf_model.prediction.memory import (
    TrainingSetup,
    block_bytes_of,
    cuda_bytes_of,
    gradients_on_accelerator,
    resident_bytes_of,
    rounding_buffer,
)
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import PlacementShares
from perf_model.search.starting_points import MAX_SLOTS

CPU_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The shares of the parameters that are not resident to update on the CPU."""

NEAR_THE_BOUND = (0.9, 1.0, 1.1)
"""Multiples of the share of the lower bound that are tried, too."""

NEARBY = tuple(1.0 + step / 64 for step in range(-16, 17) if step)
"""Multiples of the CPU's share of a good ramp that ``nearby`` tries."""

FIRST, EVENLY, LATE = 0.02, 1.0, 5.0
"""Powers of the share of forward that has passed; ``Ramp`` explains them."""

MAX_LONG_SHARE = 0.25
"""Slots are made shorter than the longest units if those are at most this share of the parameters."""


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A rule that places units in forward's order.

    Where the share x of the parameters has passed, the share ``x ** resident_power`` of the residents has passed. Where
    the share y of the other parameters has passed, the share ``y ** cpu_power`` of those on the CPU has passed;
    ``cpu_share`` is their share of the other parameters.
    Units longer than ``slot_numel`` are not streamed: they are resident, or with ``long_on_cpu`` on the CPU if
    they come in the second half.
    """

    num_slots: int
    slot_numel: int
    long_on_cpu: bool
    resident_power: float
    cpu_share: float
    cpu_power: float


def ramps(numels: Sequence[int], bound: PlacementShares, *, streams: bool) -> Iterator[Ramp]:
    """Yield the ramps to try; ``bound`` are the shares of the lower bound. Without ``streams``, nothing is streamed."""
    longest, *shorter = slot_lengths(numels)
    long_ones = [(longest, False), *product(shorter, (False, True))]
    balanced = 1.0 - bound.streamed / max(1e-9, 1.0 - bound.resident)
    shares = sorted({*CPU_SHARES, *(min(1.0, max(0.0, factor * balanced)) for factor in NEAR_THE_BOUND)})
    streaming = list(product(range(1, MAX_SLOTS + 1), long_ones, shares)) if streams else []
    nothing_streamed = [(0, long_ones[0], 1.0)]
    powers = ((FIRST, EVENLY), (FIRST, LATE), (EVENLY, EVENLY))
    for (resident_power, cpu_power), (num_slots, (slot_numel, long_on_cpu), cpu_share) in product(
        powers, [*streaming, *nothing_streamed]
    ):
        yield Ramp(
            num_slots=num_slots,
            slot_numel=slot_numel,
            long_on_cpu=long_on_cpu,
            resident_power=resident_power,
            cpu_share=cpu_share,
            cpu_power=cpu_power,
        )


def slot_lengths(numels: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of slots to try: that of the longest units, and the next one if few units are that long."""
    longest = max(numels)
    others = [numel for numel in numels if numel < longest]
    few = sum(numels) - sum(others) <= MAX_LONG_SHARE * sum(numels)
    return (longest, max(others)) if others and few else (longest,)


def adapt(chosen: Sequence[Ramp], larger: Workload, smaller: Workload) -> list[Ramp]:
    """Return the ramps ``chosen`` of larger units for smaller units of the same parameters."""
    of_longest = max(unit.numel for unit in larger.units)
    lengths = slot_lengths([unit.numel for unit in smaller.units])
    return [replace(ramp, slot_numel=lengths[0 if ramp.slot_numel == of_longest else -1]) for ramp in chosen]


def nearby(ramp: Ramp) -> Iterator[Ramp]:
    """Yield ramps that differ from ``ramp`` a little in the CPU's share."""
    for share in (factor * ramp.cpu_share for factor in NEARBY):
        if 0.0 < share <= 1.0:
            yield replace(ramp, cpu_share=share)


def vary(ramp: Ramp, scale: float, random: Random) -> Ramp:
    """Return a ramp with other powers and another share, and sometimes with one slot more or less.

    They differ by random factors, whose logarithms are proportional to ``scale``.
    """
    other_slots = ramp.num_slots > 0 and random.random() < scale
    return replace(
        ramp,
        num_slots=min(MAX_SLOTS, max(1, ramp.num_slots + random.choice((-1, 1)))) if other_slots else ramp.num_slots,
        resident_power=ramp.resident_power * exp(random.gauss(0.0, 4.0 * scale)),
        cpu_share=min(1.0, ramp.cpu_share * exp(random.gauss(0.0, scale))) if ramp.num_slots else ramp.cpu_share,
        cpu_power=ramp.cpu_power * exp(random.gauss(0.0, 2.0 * scale)),
    )


def place_ramps(
    chosen: Sequence[Ramp], workload: Workload, gpu_bytes: Integers | int | None, setup: TrainingSetup
) -> Integers:
    """Return the codes of the placements of each ramp, of shape [ramp, unit].

    As many units are resident as fit in ``gpu_bytes`` (of all ramps, or of each; None: unlimited) next to the slots and
    the gradients. If gradients do not fit, more units are on the CPU. The allocator may take a little more memory than
    is counted here.
    Units whose placement is fixed keep it.
    """
    numels = np.array([unit.numel for unit in workload.units], dtype=np.float64)
    fixed = np.array([-1 if unit.fixed is None else CODES[unit.fixed] for unit in workload.units])
    free = fixed < 0
    in_slot = numels[fixed == CODES[Placement.STREAMED]].max(initial=0)
    slot_numel, num_slots, resident_power, cpu_share, cpu_power = (
        np.array([getattr(ramp, name) for ramp in chosen])
        for name in ("slot_numel", "num_slots", "resident_power", "cpu_share", "cpu_power")
    )
    long_on_cpu = np.array([ramp.long_on_cpu for ramp in chosen], dtype=bool)
    num_slots, slot_numel = np.maximum(num_slots, in_slot > 0), np.maximum(slot_numel, in_slot)
    lengths = {*numels.tolist(), *slot_numel.tolist()}
    states_of = {numel: resident_bytes_of(int(numel), setup.widths) for numel in lengths}
    states_bytes = np.array([states_of[numel] for numel in numels.tolist()], dtype=np.float64)
    gradient_bytes = np.array([block_bytes_of(unit.numel * setup.widths.grad) for unit in workload.units])
    free_bytes = np.full(len(chosen), np.inf if gpu_bytes is None else gpu_bytes, dtype=np.float64)
    free_bytes -= num_slots * np.array([states_of[numel] for numel in slot_numel.tolist()])
    free_bytes -= cuda_bytes_of(rounding_buffer(int(numels.max()), setup))
    if setup.accumulates:
        every = Counter(unit.numel for unit in workload.units)
        free_bytes -= cuda_bytes_of(gradients_on_accelerator(every, setup.widths.grad))
        gradient_bytes = np.zeros_like(gradient_bytes)
    resident_bytes = states_bytes + gradient_bytes
    free_bytes -= resident_bytes[fixed == CODES[Placement.RESIDENT]].sum()
    free_bytes -= gradient_bytes[fixed == CODES[Placement.STREAMED]].sum()

    passed = np.cumsum(numels * free) / max(1.0, (numels * free).sum())
    is_long = free & (numels > slot_numel[:, None])
    long_resident = is_long & ~(long_on_cpu[:, None] & (passed > 0.5))
    free_bytes = free_bytes - long_resident @ resident_bytes
    short = free & ~is_long
    short_states, short_gradients = short @ states_bytes, short @ gradient_bytes
    # Of the short units, the share ``resident`` is resident, and of the others the share ``cpu_share`` is on the CPU.
    not_kept = 1.0 - np.clip(free_bytes / np.maximum(1.0, short_gradients), 0.0, 1.0)
    cpu_share = np.where(short_gradients > 0, np.maximum(cpu_share, not_kept), cpu_share)
    streamed_bytes = (1.0 - cpu_share) * short_gradients
    resident = (free_bytes - streamed_bytes) / np.maximum(1.0, short_states + short_gradients - streamed_bytes)
    resident = np.clip(resident, 0.0, 1.0)
    free_bytes = free_bytes - (1.0 - resident) * streamed_bytes
    residents = resident * (short @ numels)
    others = np.maximum(1.0, (numels * free).sum() - residents - long_resident @ numels)
    # Error diffusion as in ``place_by_fraction``, with one row per unit, so that each step reads adjacent elements.
    powers, power_of_ramp = np.unique(resident_power, return_inverse=True)
    due = residents * (passed[:, None] ** powers)[:, power_of_ramp] - numels[:, None] / 2
    due[~short.T] = -np.inf
    resident_rows, cpu_rows = np.zeros((2, *due.shape), dtype=bool)
    taken = np.zeros(len(chosen))
    units = list(zip(numels.tolist(), resident_bytes.tolist(), strict=True))
    for (numel, needed_bytes), due_row, row in zip(units, due, resident_rows, strict=True):
        np.less(taken, due_row, out=row)
        row &= free_bytes >= needed_bytes
        taken += row * numel
        free_bytes -= row * needed_bytes
    resident_rows |= long_resident.T
    other_rows = free[:, None] & ~resident_rows
    due = cpu_share * others * (np.cumsum(numels[:, None] * other_rows, axis=0) / others) ** cpu_power
    due -= numels[:, None] / 2
    due[is_long.T | (cpu_share == 1.0)] = np.inf
    due[~other_rows] = -np.inf
    taken = np.zeros(len(chosen))
    for (numel, _), due_row, row in zip(units, due, cpu_rows, strict=True):
        np.less(taken, due_row, out=row)
        taken += row * numel
    codes = np.full((len(chosen), len(numels)), CODES[Placement.STREAMED])
    codes[resident_rows.T] = CODES[Placement.RESIDENT]
    codes[cpu_rows.T] = CODES[Placement.CPU]
    codes[:, ~free] = fixed[~free]
    return codes
