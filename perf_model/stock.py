"""DeepSpeed's own offloaded update as a schedule: one sub-group after another (``stage3.py``, ``step``)."""

from __future__ import annotations

from collections.abc import Sequence

from perf_model.action import Action
from perf_model.dependencies import CHAINS
from perf_model.placement import Placement
from perf_model.schedule import Schedule


def serial_schedule(placements: Sequence[Placement]) -> Schedule:
    """Each action waits for the one before it. ``RESIDENT`` sub-groups are Twin-Flow's; nothing is streamed."""
    assert Placement.STREAMED not in placements
    actions: list[Action] = []
    for sub_group, placement in enumerate(placements):
        for kind in CHAINS[placement]:
            # What is earlier on the same lane needs no wait.
            waits = tuple(before.name for before in actions[-1:] if before.lane is not kind.lane)
            actions.append(Action(kind, sub_group, waits=waits))
    return Schedule(num_slots=0, slot_numel=0, staging_bytes=0, actions=tuple(actions))
