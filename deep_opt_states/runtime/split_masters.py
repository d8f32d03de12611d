"""Keep the master weights that the CPU updates in two halves, and join them before any other code uses them.

Where the CPU updates a range and publishes its parameters, it needs the master weights and the same weights rounded to
bf16. Split (``split_form.py``), both fit into the 4 bytes of the fp32 master. That saves 2 bytes per parameter of host
memory, and of the traffic of an update.

A range is split before its first update. It is joined before any other code reads or writes optimizer states, and
before it is updated in another way. The masters are then ordinary fp32 tensors in the same memory, so that checkpoints
need no other memory, and what is written to them takes effect. Two cases are never split: streamed and resident units,
whose states the accelerator updates, and the early ranges of all units, which have buffers for rounded parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deep_opt_states.device.kernels import split_form
from deep_opt_states.device.kernels.adam import ElementRange
from deep_opt_states.runtime.state import Split, UnitState
from perf_model.schedule.placement import Placement


class SplitMasters:
    """The ranges of one executor whose masters are split while the CPU updates them, and which of them are split now.

    The caller calls ``split`` before it issues an update, and every other method only while nothing is in flight.
    """

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, ElementRange], tuple[torch.Tensor, torch.Tensor]] = {}
        """The masters and the second moments of each range, by its sub-group and elements."""
        self._are_split: dict[tuple[int, ElementRange], tuple[torch.Tensor, torch.Tensor]] = {}
        """The same for the ranges that are split now."""

    def set_units(self, states: Sequence[UnitState], splits: Sequence[Split]) -> None:
        """Split the masters of ``states`` from the next update on. ``splits`` has the early ranges of each of them.

        Join the ranges that are updated in another way from now on.
        """
        self._ranges = {
            (state.sub_group, element_range): (
                state.view(state.master, element_range),
                state.view(state.exp_avg_sq, element_range),
            )
            for state, split in zip(states, splits, strict=True)
            if state.rounded is None
            for element_range in _updated_on_cpu(state, split)
        }
        self._join(set(self._are_split).difference(self._ranges))

    def split(self) -> None:
        """Split what is not split. Raise ``ValueError`` if a second moment is negative."""
        for key, tensors in self._ranges.items():
            if key not in self._are_split:
                split_form.split(*tensors)
                self._are_split[key] = tensors

    def join(self) -> None:
        """Make all masters fp32."""
        self._join(set(self._are_split))

    def close(self) -> None:
        """Drop the references to the states."""
        self._ranges.clear()
        self._are_split.clear()

    def _join(self, keys: set[tuple[int, ElementRange]]) -> None:
        for key in keys:
            split_form.join(*self._are_split[key])
            del self._are_split[key]


def _updated_on_cpu(state: UnitState, split: Split) -> tuple[ElementRange, ...]:
    """Return the ranges that the CPU updates and publishes from memory of their own."""
    if state.is_evicted:
        return split.early
    return split.rest if state.placement is Placement.CPU else ()
