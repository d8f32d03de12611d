"""Define the schedule of an update without overlap, as in stock DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence

from perf_model.schedule.action import Action
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule


def serial_schedule(placements: Sequence[Placement]) -> Schedule:
    """Return the schedule of stock DeepSpeed or Twin-Flow: each action waits for the action before it."""
    assert Placement.STREAMED not in placements
    actions: list[Action] = []
    for unit, placement in enumerate(placements):
        for kind in CHAINS[placement]:
            waits = tuple(before.name for before in actions[-1:] if before.lane is not kind.lane)
            actions.append(Action(kind, unit, waits=waits))
    return Schedule(num_slots=0, slot_numel=0, actions=tuple(actions))
