"""Parse schedules that tests write as text: one action per line, as in ``PREFETCH 3 slot 0 after FLUSH_STATES 1``."""

from __future__ import annotations

import re

from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.schedule import Schedule

_ACTION = re.compile(r"(?P<kind>[A-Z_]+) (?P<unit>\d+)( slot (?P<slot>\d+))?( after (?P<waits>.+))?")


def parse_action(text: str) -> Action:
    """Return the action that ``text`` describes; the inverse of ``str``."""
    match = _ACTION.fullmatch(text.strip())
    assert match is not None, text
    return Action(
        kind=ActionKind[match["kind"]],
        unit=int(match["unit"]),
        slot=None if match["slot"] is None else int(match["slot"]),
        waits=() if match["waits"] is None else tuple(match["waits"].split(", ")),
    )


def parse_schedule(text: str, num_slots: int, slot_numel: int) -> Schedule:
    """Return the schedule of the actions in ``text``."""
    actions = tuple(map(parse_action, text.strip().splitlines()))
    return Schedule(num_slots=num_slots, slot_numel=slot_numel, actions=actions)
