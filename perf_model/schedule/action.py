"""Define the actions of a schedule: the steps of the update of one unit, and the lane that runs each of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Lane(Enum):
    """A queue that executes its actions in the order in which they were issued. Lanes run concurrently.

    There are two lanes for copies to the accelerator, so that the small publications do not wait behind prefetches.
    """

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    CPU = "cpu"
    PUBLISH = "publish"

    # Enum computes hashes in Python, from names. The search for a plan looks lanes up millions of times.
    __hash__ = object.__hash__


class ActionKind(Enum):
    """The kinds of actions, each of which has a lane."""

    PREFETCH = "PREFETCH"
    """Copy of fp32 p, m and v to a staging slot. The gradient is already on the accelerator."""
    GPU_STEP = "GPU_STEP"
    """Unscaling, clipping and Adam on the states in a slot, or on those of a resident unit. Writes the 16-bit
    parameters in place."""
    FLUSH_STATES = "FLUSH_STATES"
    """Copy of p, m and v from the slot back to host memory."""
    CPU_STEP = "CPU_STEP"
    """Unscaling, clipping, Adam and rounding to 16 bit, in host memory."""
    PUBLISH = "PUBLISH"
    """Copy of the 16-bit parameters of a CPU unit to the accelerator."""

    __hash__ = object.__hash__

    @property
    def lane(self) -> Lane:
        """Return the lane that runs actions of this kind."""
        return _LANES[self]


_LANES = {
    ActionKind.PREFETCH: Lane.H2D,
    ActionKind.GPU_STEP: Lane.COMPUTE,
    ActionKind.FLUSH_STATES: Lane.D2H,
    ActionKind.CPU_STEP: Lane.CPU,
    ActionKind.PUBLISH: Lane.PUBLISH,
}


@dataclass(frozen=True)
class Action:
    """One step of the update of one unit.

    ``slot`` is the staging slot that the action reads or writes (streamed units only). ``waits`` names the actions
    of *other* lanes that must have finished before this one starts. Earlier actions of the same lane need no wait.
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
        return _LANES[self.kind]

    def __str__(self) -> str:
        slot = "" if self.slot is None else f" slot {self.slot}"
        waits = f" after {', '.join(self.waits)}" if self.waits else ""
        return f"{self.name}{slot}{waits}"
