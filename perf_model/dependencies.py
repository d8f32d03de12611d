"""What must have finished before an action starts: data it reads, and the slot it takes over."""

from __future__ import annotations

from collections.abc import Sequence

from perf_model.action import Action, ActionKind
from perf_model.placement import Placement

CHAINS: dict[Placement, tuple[ActionKind, ...]] = {
    Placement.CPU: (ActionKind.CPU_STEP, ActionKind.PUBLISH),
    Placement.STREAMED: (ActionKind.PREFETCH, ActionKind.GPU_STEP, ActionKind.FLUSH_STATES),
    Placement.RESIDENT: (ActionKind.GPU_STEP,),
}
"""The actions of one sub-group by placement; each reads what the one before it wrote."""


def dependencies(actions: Sequence[Action]) -> dict[str, tuple[Action, ...]]:
    """By action name, the actions that must have finished before it starts, of a well-formed schedule.

    The predecessor in the sub-group's chain; and for a PREFETCH the FLUSH_STATES of the slot's previous
    occupant, which still reads what the prefetch overwrites.
    """
    by_name = {action.name: action for action in actions}
    latest: dict[int, Action] = {}
    occupant: dict[int, Action] = {}
    needs: dict[str, tuple[Action, ...]] = {}
    for action in actions:
        required = [latest[action.sub_group]] if action.sub_group in latest else []
        latest[action.sub_group] = action
        if action.kind is ActionKind.PREFETCH and action.slot is not None:
            if action.slot in occupant:
                required.append(by_name[f"{ActionKind.FLUSH_STATES.value} {occupant[action.slot].sub_group}"])
            occupant[action.slot] = action
        needs[action.name] = tuple(required)
    return needs
