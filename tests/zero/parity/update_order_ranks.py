"""Train param groups whose units are not in the order of forward. Every rank prints two answers.

The first answer is with overlap in forward, the second without. Each has the order of the units in every schedule that
the executor used.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from deep_opt_states.runtime.issuer import Issuer
from perf_model.schedule.schedule import Schedule
from tests.launch import answer
from tests.zero.parity.case import Case
from tests.zero.parity.cases import BASE_GROUP, DECAYING_GROUP
from tests.zero.parity.training import differences, run_variant
from tests.zero.process_group import process_group

BLOCK = {"placement": "stride", "update_stride": 2, "num_slots": 1}


def main(overlap: bool) -> None:
    block = {**BLOCK, "overlap_forward": overlap}
    case = Case(
        name="ordered",
        blocks=(block,),
        groups=(BASE_GROUP, DECAYING_GROUP),
        world_size=2,
        clip=0.3,
        sub_group_size=1000,
    )
    published: list[list[int]] = []
    set_schedule = Issuer.set_schedule

    def recorded(self: Issuer, schedule: Schedule) -> None:
        kinds = ("PUBLISH", "GPU_STEP")
        published.append([action.unit for action in schedule.actions if action.kind.value in kinds])
        set_schedule(self, schedule)

    expected = run_variant(case, None)
    with mock.patch.object(Issuer, "set_schedule", recorded):
        found = run_variant(case, block)
    result: dict[str, Any] = {"differences": differences(expected, found), "published": published}
    answer(result)


if __name__ == "__main__":
    with process_group():
        main(True)
        main(False)
