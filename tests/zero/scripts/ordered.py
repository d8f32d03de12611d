"""Trains param groups whose sub-groups forward does not use in their order. Every rank prints an answer."""

from __future__ import annotations

from typing import Any
from unittest import mock

from deep_opt_states.runtime.executor import Executor
from perf_model.schedule.schedule import Schedule
from tests.launch import answer
from tests.zero.parity.arm import differences, run_arm
from tests.zero.parity.case import Case
from tests.zero.parity.cases import A, B
from tests.zero.process_group import process_group

BLOCK = {"placement": "stride", "update_stride": 2, "num_slots": 1}


def main(overlap: bool) -> None:
    block = {**BLOCK, "overlap_forward": overlap}
    case = Case(name="ordered", blocks=(block,), groups=(A, B), world_size=2, clip=0.3, sub_group_size=1000)
    published: list[list[int]] = []
    use = Executor.use

    def noted_use(self: Executor, schedule: Schedule) -> None:
        kinds = ("PUBLISH", "GPU_STEP")
        published.append([action.sub_group for action in schedule.actions if action.kind.value in kinds])
        use(self, schedule)

    expected = run_arm(case, None)
    with mock.patch.object(Executor, "use", noted_use):
        found = run_arm(case, block)
    result: dict[str, Any] = {"differences": differences(expected, found), "published": published}
    answer(result)


if __name__ == "__main__":
    with process_group():
        main(True)
        main(False)
