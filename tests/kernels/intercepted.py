"""Intercept the updates of the CPU kernel, range by range, even if one call updates many ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest import mock

from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam


def before_each_update(act: Callable[[RangeUpdate], object]) -> AbstractContextManager[object]:
    """Return a context in which ``act`` is called for each range of a call before any of them is updated."""
    update_ranges = FusedAdam.update_ranges

    def intercepted(self: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
        for update in updates:
            act(update)
        update_ranges(self, updates)

    return mock.patch.object(FusedAdam, "update_ranges", intercepted)
