"""Define the actions of a schedule and the lanes that run them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Lane(Enum):
    """A queue of actions. Publications have their own lane, so that they do not wait behind prefetches."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    CPU = "cpu"
    PUBLISH = "publish"
    READ = "read"
    WRITE = "write"

    # Enum computes hashes in Python, from names, and the planner looks lanes up millions of times.
    __hash__ = object.__hash__

    @property
    def is_thread(self) -> bool:
        """Return whether a thread of the host runs the actions; otherwise, a stream of the accelerator does."""
        return self in (Lane.CPU, Lane.READ, Lane.WRITE)


class ActionKind(Enum):
    """A kind of action, which determines its lane."""

    lane: Lane

    PREFETCH = "PREFETCH", Lane.H2D
    """Copy of p, m and v to a staging slot. The gradient is already on the accelerator."""
    GPU_STEP = "GPU_STEP", Lane.COMPUTE
    """Unscaling, clipping and Adam in a slot or on a resident unit. It writes the 16-bit parameters."""
    FLUSH_STATES = "FLUSH_STATES", Lane.D2H
    GPU_SPECULATE = "GPU_SPECULATE", Lane.COMPUTE
    """A GPU step in a slot that leaves the model's parameters alone, possibly before the norm is known."""
    CPU_STEP = "CPU_STEP", Lane.CPU
    SPECULATE = "SPECULATE", Lane.CPU
    """A CPU step from the current version of the states to the other one, possibly before the norm is known."""
    COMMIT = "COMMIT", Lane.CPU
    """Exchange of the two versions, once the step is known to be the one that was speculated."""
    PUBLISH = "PUBLISH", Lane.PUBLISH
    """Copy of the updated parameters of a CPU unit to the place where the model reads them."""
    ADOPT = "ADOPT", Lane.H2D
    """COMMIT and PUBLISH of a streamed unit that is eager: its flush has written the other version and parameters."""
    READ = "READ", Lane.READ
    """Read of p, m and v of a unit on disk to a disk slot in host memory, where the CPU updates them."""
    WRITE = "WRITE", Lane.WRITE

    __hash__ = object.__hash__

    def __new__(cls, name: str, lane: Lane) -> ActionKind:
        kind = object.__new__(cls)
        kind._value_, kind.lane = name, lane
        return kind


@dataclass(frozen=True)
class Action:
    """One step of the update of one unit, in the staging ``slot`` if it is streamed, in a disk slot if it is on disk.

    ``waits`` names the actions of *other* lanes that must have finished before this one starts.
    """

    kind: ActionKind
    unit: int
    slot: int | None = None
    waits: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """Return the name, which is unique in a schedule. It joins predicted and measured times."""
        return f"{self.kind.value} {self.unit}"

    @property
    def lane(self) -> Lane:
        return self.kind.lane

    def __str__(self) -> str:
        slot = "" if self.slot is None else f" slot {self.slot}"
        waits = f" after {', '.join(self.waits)}" if self.waits else ""
        return f"{self.name}{slot}{waits}"


def lanes_of(actions: Iterable[Action]) -> list[Lane]:
    """Return the lanes of a table or a picture, with the disk's only if one of ``actions`` uses a disk."""
    used = {action.lane for action in actions}
    return [lane for lane in Lane if lane in used or lane not in (Lane.READ, Lane.WRITE)]
