"""Define where a unit is updated."""

from __future__ import annotations

from enum import Enum


class Placement(Enum):
    """The place where the states of a unit are kept and updated."""

    CPU = "cpu"
    """The states stay in host memory, and Adam runs on the host."""
    STREAMED = "streamed"
    """The states are copied from host memory to a slot on the accelerator and back in each step."""
    RESIDENT = "resident"
    """The states stay in accelerator memory and are updated there."""

    # As in ``action.py``: the planner looks placements up millions of times.
    __hash__ = object.__hash__
