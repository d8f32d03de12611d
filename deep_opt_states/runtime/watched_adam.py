"""Update split masters on the accelerator, on a copy of their upper halves whose sums are compared before."""

from __future__ import annotations

from collections.abc import Sequence

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, ElementRange, RangeUpdate
from deep_opt_states.runtime.split_masters import SplitMasters


class WatchedAdam:
    """The kernel ``adam`` of the accelerator. ``split_masters`` fills and sums the buffer before and after each update.

    All of it is on the stream that is current, in this order.
    """

    def __init__(self, adam: AdamKernel, split_masters: SplitMasters) -> None:
        self._adam = adam
        self._split_masters = split_masters

    def zero(self, tensors: AdamTensors) -> None:
        self._adam.zero(tensors)

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._adam.begin_step(steps)

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        element_range = element_range or ElementRange.whole(tensors.master.numel())
        self.update_ranges([RangeUpdate(sub_group=sub_group, tensors=tensors, element_range=element_range)])

    def update_ranges(self, updates: Sequence[RangeUpdate]) -> None:
        for update in updates:
            self._split_masters.before(update)
        self._adam.update_ranges(updates)
        for update in updates:
            self._split_masters.after(update)

    def restart(self) -> None:
        self._adam.restart()

    def close(self) -> None:
        self._adam.close()
