"""Check lowering, the text and the slots of schedules, and that faulty plans and schedules are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from perf_model.schedule.action import Lane
from perf_model.schedule.check import ScheduleError, check, check_next_update
from perf_model.schedule.lowering import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots import flushes_before
from perf_model.schedule.workload import Range, Unit, Workload
from tests.model.strategies import parse_schedule, plans, schedules, without_one_wait

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
WORKLOAD = Workload.from_numels([100, 100, 100, 60])
MIXED = (CPU, STREAMED, STREAMED, CPU)
PLAN = UpdatePlan(workload=WORKLOAD, placements=MIXED, num_slots=2)
ANY_PLACE = {"may_be_eager": True, "may_be_on_disk": True}


@given(plans(**ANY_PLACE))
def test_every_plan_is_lowered_to_a_safe_schedule_without_more_slots_than_streamed_units(plan: UpdatePlan) -> None:
    schedule = plan.schedule
    assert check(schedule, plan.workload) == plan.placements
    placed = zip(plan.workload.units, plan.placements, strict=True)
    streamed = [unit.numel for unit, placement in placed if placement is STREAMED]
    assert schedule.num_slots == min(plan.num_slots, len(streamed))
    assert schedule.slot_numel == max(streamed, default=0)


@given(schedules(**ANY_PLACE))
def test_every_wait_and_every_action_is_needed_once(drawn: tuple[Schedule, Workload]) -> None:
    schedule, workload = drawn
    check(schedule, workload)
    for fault, mutant in without_one_wait(schedule):
        note(fault)
        with pytest.raises(ScheduleError, match="may start before"):
            check(mutant, workload)
    actions = schedule.actions
    for place, action in enumerate(actions):
        note(f"{action.name} dropped or repeated")
        for faulty in (actions[:place] + actions[place + 1 :], actions[: place + 1] + actions[place:]):
            with pytest.raises(ScheduleError):
                check(replace(schedule, actions=faulty), workload)


def test_fingerprints_of_different_plans_differ() -> None:
    longer = Workload.from_numels([100, 100, 100, 61])
    others = replace(PLAN, num_slots=1), replace(PLAN, placements=(CPU,) * 4), replace(PLAN, workload=longer)
    assert len({plan.fingerprint for plan in (PLAN, replace(PLAN), *others)}) == 4


PERSISTENT = Workload((Unit(0, (Range(0, 0, 9),), is_persistent=True), *WORKLOAD.units[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placements": (CPU,)}, "one placement per unit"),
        ({"num_slots": 0}, "at least 1 slot, found 0"),
        *(
            ({"order": order}, "names each of its 4 units once, found")
            for order in ((0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4))
        ),
        ({"placements": (CPU, RESIDENT) * 2, "eager": frozenset({2, 3})}, r"is eager, found \[3\]"),
        ({"workload": PERSISTENT, "eager": frozenset({0})}, r"is eager, found \[0\]"),
    ],
)
def test_an_impossible_plan_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **change)


def test_units_are_merged_by_progress() -> None:
    # CPU: 100 and 60 of 160 are done at 0.63 and 1. Streamed: 100 and 100 of 200 are half done at 0.25 and 0.75.
    assert forward_order(WORKLOAD, MIXED) == (1, 0, 2, 3)
    # Resident units wait for nothing and come first.
    assert forward_order(WORKLOAD, (CPU, STREAMED, RESIDENT, RESIDENT)) == (2, 3, 1, 0)


@given(plans(may_be_eager=True), st.randoms())
def test_a_plan_executes_the_order_that_it_names(plan: UpdatePlan, random: Random) -> None:
    order = list(range(len(plan.placements)))
    random.shuffle(order)
    ordered = replace(plan, order=tuple(order))
    check(ordered.schedule, plan.workload)
    updates = [action.unit for action in ordered.schedule.actions if action.lane is Lane.COMPUTE]
    on_accelerator = [index for index in order if plan.placements[index] is not CPU]
    assert updates == sorted(on_accelerator, key=lambda index: -order.index(index) if index in plan.eager else 1)


STREAMED_CHAIN = "PREFETCH 0 slot 0\nGPU_STEP 0 slot 0 after PREFETCH 0\nFLUSH_STATES 0 slot 0 after GPU_STEP 0"
NEXT_CHAIN = re.sub(r"([A-Z]) 0", r"\1 1", STREAMED_CHAIN)
ON_CPU = "CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0"


@pytest.mark.parametrize(
    ("text", "numels", "rule", "marked"),
    [
        ("CPU_STEP 0\nPUBLISH 0", [9], "PUBLISH 0 may start before CPU_STEP 0", "PUBLISH 0"),
        ("PUBLISH 0 after CPU_STEP 0\nCPU_STEP 0", [9], "in that order; found PUBLISH CPU_STEP", "CPU_STEP 0"),
        (ON_CPU, [9, 9], "Unit 1 .* found nothing", None),
        (f"{ON_CPU}, CPU_STEP 9", [9], "CPU_STEP 9 was not", "PUBLISH 0"),
        (f"{ON_CPU}\nCPU_STEP 1 after CPU_STEP 0\nPUBLISH 1 after CPU_STEP 1", [9, 9], "of another lane", "CPU_STEP 1"),
        ("SPECULATE 0\nPUBLISH 0 after SPECULATE 0", [9], "SPECULATE COMMIT PUBLISH or .*, in that order", "PUBLISH 0"),
        ("SPECULATE 0\nCOMMIT 0\nPUBLISH 0", [9], "PUBLISH 0 may start before COMMIT 0", "PUBLISH 0"),
        (
            f"{STREAMED_CHAIN.replace('STEP', 'SPECULATE')}\nADOPT 0 slot 0",
            [9],
            "ADOPT 0 may start before FLUSH_STATES 0",
            "ADOPT 0",
        ),
        ("CPU_STEP 7", [9], "There are 1 units", "CPU_STEP"),
        (ON_CPU.replace("0\n", "0 slot 0\n"), [9], "Only a streamed unit and one on disk use a slot", "CPU_STEP 0"),
        (STREAMED_CHAIN, [101], "A slot holds 100 parameters; unit 0 has 101", "PREFETCH 0"),
        *(
            (STREAMED_CHAIN.replace(" slot 0", slot), [9], "needs one of 2 slots", "PREFETCH 0")
            for slot in ("", " slot 2")
        ),
        (STREAMED_CHAIN.replace("TES 0 slot 0", "TES 0 slot 1"), [9], "stays in the slot", "FLUSH_STATES 0"),
        (f"{STREAMED_CHAIN}\n{NEXT_CHAIN}", [9, 9], "PREFETCH 1 may start before FLUSH_STATES 0", "PREFETCH 1"),
    ],
)
def test_the_failing_action_of_a_schedule_is_marked(
    text: str, numels: list[int], rule: str, marked: str | None
) -> None:
    with pytest.raises(ScheduleError, match=rule) as caught:
        check(parse_schedule(text, num_slots=2, slot_numel=100), Workload.from_numels(numels))
    rows = [row for row in str(caught.value).splitlines() if row.startswith(">")]
    assert len(rows) == (marked is not None)
    assert not rows or marked in rows[0]


@pytest.mark.P6
@given(plans(max_numel=300, may_be_on_disk=True))
def test_the_next_update_is_refused_without_one_of_its_waits_for_flushes(plan: UpdatePlan) -> None:
    waits = flushes_before(plan.schedule)
    check_next_update(plan.schedule, waits)
    for left_out in waits:
        with pytest.raises(ScheduleError, match=r"of the next update may start before (FLUSH_STATES|WRITE)"):
            check_next_update(plan.schedule, {name: flush for name, flush in waits.items() if name != left_out})
