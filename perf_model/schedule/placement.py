"""Define where a unit is updated."""

from __future__ import annotations

from enum import Enum


class Placement(Enum):
    """The place where the states of a unit are kept and updated."""

    CPU = "cpu"
    STREAMED = "streamed"
    """The states travel from host memory to a slot on the accelerator and back in each step."""
    RESIDENT = "resident"

    # As in ``action.py``: the planner looks placements up millions of times.
    __hash__ = object.__hash__
