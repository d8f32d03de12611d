"""An accelerator that seems to have room for slots beyond the plan's, then for fewer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from deep_opt_states.runtime.headroom import Headroom
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.step import adaptive_schedule

FREE = [500, 500, 500, 500, 500, 250, 250, 500]
"""Bytes beside our slots of 100 after each step; 50 stay free."""


@contextmanager
def room_for_slots() -> Iterator[None]:
    room = Headroom(slot_bytes=100, margin_bytes=50, most=3)
    free = iter(FREE)
    held: list[int] = []

    def left() -> tuple[int, int]:
        held.append(room.slots)
        return next(free) - 100 * max(held), 0

    with (
        mock.patch.object(AcceleratorChoice, "headroom", return_value=room),
        mock.patch.object(adaptive_schedule, "free_and_retries", left),
    ):
        yield
