"""Interferes with the updates of the CPU kernel, part by part, also where one call updates many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest import mock

from deep_opt_states.device.kernels.adam import PartUpdate
from deep_opt_states.device.kernels.fused import FusedAdam


def before_each_update(act: Callable[[PartUpdate], object]) -> AbstractContextManager[object]:
    """Call ``act`` for each part of a call before any of them is updated."""
    update_parts = FusedAdam.update_parts

    def intercepted(self: FusedAdam, updates: Sequence[PartUpdate]) -> None:
        for each in updates:
            act(each)
        update_parts(self, updates)

    return mock.patch.object(FusedAdam, "update_parts", intercepted)
