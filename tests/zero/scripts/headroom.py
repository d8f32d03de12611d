"""Trains while the accelerator seems to have room for more slots, then for fewer, then none at all.

Prints an answer: what differs from stock, and how many slots each update went through.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import Slot
from tests.launch import answer
from tests.zero.parity.arm import differences, run_arm
from tests.zero.parity.case import STREAMED_ONE_SLOT, Case
from tests.zero.process_group import process_group
from tests.zero.slots_beyond import FREE, room_for_slots


def main(block: dict[str, Any], refuses: bool) -> None:
    case = Case(name="headroom", blocks=(block,), clip=0.3, steps=len(FREE) + 1)
    slots: list[int] = []
    begin, reserve = Executor.begin, Slot.reserve

    def noted_begin(self: Executor, *args: Any) -> None:
        slots.append(self._schedule.num_slots)
        begin(self, *args)

    def refused(*args: Any) -> Slot:
        if slots:
            raise torch.OutOfMemoryError("no room")
        return reserve(*args)

    expected = run_arm(case, None)
    with (
        room_for_slots(),
        mock.patch.object(Executor, "begin", noted_begin),
        mock.patch.object(Slot, "reserve", refused if refuses else reserve),
    ):
        found = run_arm(case, block)
    answer({"differences": differences(expected, found), "slots": slots})


if __name__ == "__main__":
    with process_group():
        main(STREAMED_ONE_SLOT, refuses=False)
        main({**STREAMED_ONE_SLOT, "overlap_forward": False}, refuses=True)
