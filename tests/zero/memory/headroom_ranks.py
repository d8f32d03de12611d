"""Train while the accelerator appears to have memory for more slots, then for fewer, then for none.

Print the differences from stock and the number of slots of each update.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import Slot
from tests.launch import answer
from tests.zero.memory.emulated_headroom import FREE_BYTES, varying_headroom
from tests.zero.parity.case import STREAMED_ONE_SLOT, Case
from tests.zero.parity.training import differences, run_variant
from tests.zero.process_group import process_group


def main(block: dict[str, Any], refuses: bool) -> None:
    case = Case(name="headroom", blocks=(block,), clip=0.3, steps=len(FREE_BYTES) + 1)
    slots: list[int] = []
    begin, reserve = Executor.begin, Slot.reserve

    def logged_begin(self: Executor, *args: Any) -> None:
        slots.append(self._schedule.num_slots)
        begin(self, *args)

    def refused_reserve(*args: Any) -> Slot:
        if slots:
            raise torch.OutOfMemoryError("no memory")
        return reserve(*args)

    expected = run_variant(case, None)
    with (
        varying_headroom(),
        mock.patch.object(Executor, "begin", logged_begin),
        mock.patch.object(Slot, "reserve", refused_reserve if refuses else reserve),
    ):
        found = run_variant(case, block)
    answer({"differences": differences(expected, found), "slots": slots})


if __name__ == "__main__":
    with process_group():
        main(STREAMED_ONE_SLOT, refuses=False)
        main({**STREAMED_ONE_SLOT, "overlap_forward": False}, refuses=True)
