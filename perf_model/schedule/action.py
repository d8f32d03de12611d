"""The vocabulary of a schedule: what can be done to one sub-group, and on which lane.

An action's text reads back: ``PREFETCH 3 slot 0 after FLUSH_STATES 1``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Lane(Enum):
    """Executes its actions in the order they were issued; lanes run beside each other."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    CPU = "cpu"

    # Enum hashes names in Python; a plan is found by simulations that look lanes up millions of times.
    __hash__ = object.__hash__


class ActionKind(Enum):
    PREFETCH = "PREFETCH"
    """fp32 p, m, v into a slot; the gradient is on the accelerator already."""
    GPU_STEP = "GPU_STEP"
    """Unscale, clip and Adam on the slot, or on a resident's states; writes the 16-bit parameters in place."""
    FLUSH_STATES = "FLUSH_STATES"
    """p, m, v from the slot back to host memory."""
    CPU_STEP = "CPU_STEP"
    """Unscale, clip, Adam and rounding to 16 bit in host memory."""
    PUBLISH = "PUBLISH"
    """16-bit parameters of a CPU sub-group to the accelerator."""

    __hash__ = object.__hash__

    @property
    def lane(self) -> Lane:
        return _LANES[self]


_LANES = {
    ActionKind.PREFETCH: Lane.H2D,
    ActionKind.GPU_STEP: Lane.COMPUTE,
    ActionKind.FLUSH_STATES: Lane.D2H,
    ActionKind.CPU_STEP: Lane.CPU,
    ActionKind.PUBLISH: Lane.H2D,
}

_TEXT = re.compile(r"(?P<kind>[A-Z_]+) (?P<sub_group>\d+)( slot (?P<slot>\d+))?( after (?P<waits>.+))?")


@dataclass(frozen=True)
class Action:
    """One piece of work on one sub-group.

    ``slot`` is the staging slot it reads or writes (streamed sub-groups only). ``waits`` names actions of
    *other* lanes that must have finished first; what is earlier on the same lane needs no wait.
    """

    kind: ActionKind
    sub_group: int
    slot: int | None = None
    waits: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """Unique in a schedule; joins predicted with measured times."""
        return f"{self.kind.value} {self.sub_group}"

    @property
    def lane(self) -> Lane:
        return _LANES[self.kind]

    def __str__(self) -> str:
        slot = "" if self.slot is None else f" slot {self.slot}"
        waits = f" after {', '.join(self.waits)}" if self.waits else ""
        return f"{self.name}{slot}{waits}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``. Raises ``ValueError`` for text that is no action."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or match["kind"] not in ActionKind.__members__:
            raise ValueError(
                f"An action reads 'KIND sub_group [slot N] [after NAME, NAME]' with KIND one of "
                f"{', '.join(ActionKind.__members__)}; found {text.strip()!r}."
            )
        return cls(
            kind=ActionKind[match["kind"]],
            sub_group=int(match["sub_group"]),
            slot=None if match["slot"] is None else int(match["slot"]),
            waits=() if match["waits"] is None else tuple(match["waits"].split(", ")),
        )
