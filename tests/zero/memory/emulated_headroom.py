"""Emulate an accelerator that has free memory for slots beyond the plan's, then for fewer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from deep_opt_states.runtime.headroom import Headroom
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.step import adaptive_schedule

FREE_BYTES = [500, 500, 500, 500, 500, 250, 250, 500]
"""Bytes available for slots of 100 bytes each, after each step; 50 of them must stay free."""


@contextmanager
def varying_headroom() -> Iterator[None]:
    """Emulate ``FREE_BYTES`` in the following steps."""
    headroom = Headroom(slot_bytes=100, margin_bytes=50, max_slots=3)
    free = iter(FREE_BYTES)
    held: list[int] = []

    def free_and_retries() -> tuple[int, int]:
        held.append(headroom.slots)
        return next(free) - 100 * max(held), 0

    with (
        mock.patch.object(AcceleratorChoice, "headroom", return_value=headroom),
        mock.patch.object(adaptive_schedule, "free_and_retries", free_and_retries),
    ):
        yield
