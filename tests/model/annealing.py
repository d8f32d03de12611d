"""Improve a plan by simulated annealing: a slow search that knows nothing of the planner, to compare the planner with.

It changes the plan at random and simulates each change with ``Simulator``: one placement, a swap of two, a block of
neighbours or the number of slots. A change for the worse is accepted with a probability that falls to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

from perf_model.prediction.memory import memory_of
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from tests.model.window_settings import WindowSetting

MOST_SLOTS = 8
MAX_BLOCK = 12

FIRST_TEMPERATURE = 0.02
"""The first temperature, relative to the exposed time of the plan."""


@dataclass(frozen=True, kw_only=True)
class Annealed:
    """The least exposed seconds that annealing found, and the number of simulations."""

    exposed_s: float
    simulations: int


def anneal(simulations: int, plan: UpdatePlan, setting: WindowSetting) -> Annealed:
    """Anneal with at most ``simulations`` simulations. The order is always forward's."""
    budgets, windows, setup = setting.budgets, setting.windows, setting.job.setup
    simulator, random = Simulator(setting.cost, windows), Random(0)

    def added_s(candidate: UpdatePlan) -> float:
        timeline = simulator.run(candidate.schedule, candidate.workload)
        return windows.added_time(timeline, candidate.workload, setting.cost).total_s

    present = replace(plan, order=None)
    present_s = least_s = added_s(present)
    temperature_s = FIRST_TEMPERATURE * present_s
    done, refused = 1, 0
    # Where hardly a change fits, the search ends.
    while (passed := done / simulations) < 1.0 and refused < 10_000:
        candidate = _changed(present, random)
        if candidate == present or budgets.missing(memory_of(candidate, setup)):
            refused += 1
            continue
        refused = 0
        candidate_s = added_s(candidate)
        done += 1
        allowed_s = -math.log(1.0 - random.random()) * temperature_s * (1.0 - passed) ** 2
        if candidate_s <= present_s + allowed_s:
            present, present_s = candidate, candidate_s
            least_s = min(least_s, present_s)
    return Annealed(exposed_s=least_s, simulations=done)


def _changed(plan: UpdatePlan, random: Random) -> UpdatePlan:
    """Return ``plan`` with one or two changes."""
    placements, num_slots = list(plan.placements), plan.num_slots
    for _ in range(random.choice((1, 1, 2))):
        kind, index = random.random(), random.randrange(len(placements))
        if kind < 0.35:
            placements[index] = random.choice(tuple(Placement))
        elif kind < 0.7:
            other = random.randrange(len(placements))
            placements[index], placements[other] = placements[other], placements[index]
        elif kind < 0.9:
            end = min(len(placements), index + random.randint(2, MAX_BLOCK))
            placements[index:end] = [random.choice(tuple(Placement))] * (end - index)
        else:
            num_slots = min(MOST_SLOTS, max(1, num_slots + random.choice((-1, 1))))
    return replace(plan, placements=tuple(placements), num_slots=num_slots)
