"""Define the actions of a schedule: the steps of the update of one unit, and the lane that runs each of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Lane(Enum):
    """A queue of actions. Publications have a lane of their own, so that they do not wait behind prefetches."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    CPU = "cpu"
    PUBLISH = "publish"

    # Enum computes hashes in Python, from names, and the planner looks lanes up millions of times.
    __hash__ = object.__hash__


class ActionKind(Enum):
    """A kind of action, which determines its lane."""

    lane: Lane

    PREFETCH = "PREFETCH", Lane.H2D
    """Copy of fp32 p, m and v to a staging slot. The gradient is already on the accelerator."""
    GPU_STEP = "GPU_STEP", Lane.COMPUTE
    """Unscaling, clipping and Adam on the states in a slot or of a resident unit; writes the 16-bit parameters."""
    FLUSH_STATES = "FLUSH_STATES", Lane.D2H
    """Copy of p, m and v from the slot back to host memory."""
    CPU_STEP = "CPU_STEP", Lane.CPU
    """Unscaling, clipping, Adam and rounding to 16 bit, in host memory."""
    PUBLISH = "PUBLISH", Lane.PUBLISH
    """Copy of the 16-bit parameters of a CPU unit to the accelerator."""

    __hash__ = object.__hash__

    def __new__(cls, name: str, lane: Lane) -> ActionKind:
        """Return the kind of that value, with the lane that runs its actions."""
        kind = object.__new__(cls)
        kind._value_, kind.lane = name, lane
        return kind


@dataclass(frozen=True)
class Action:
    """One step of the update of one unit.

    ``slot`` is the staging slot of a streamed unit. ``waits`` names the actions of *other* lanes that must have
    finished before this one starts. Earlier actions of the same lane need no wait.
    """

    kind: ActionKind
    unit: int
    slot: int | None = None
    waits: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """Return the name, which is unique in a schedule: predicted and measured times are joined by it."""
        return f"{self.kind.value} {self.unit}"

    @property
    def lane(self) -> Lane:
        """Return the lane that runs this action."""
        return self.kind.lane

    def __str__(self) -> str:
        slot = "" if self.slot is None else f" slot {self.slot}"
        waits = f" after {', '.join(self.waits)}" if self.waits else ""
        return f"{self.name}{slot}{waits}"
