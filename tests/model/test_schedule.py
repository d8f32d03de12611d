"""Check placing by stride, lowering, the text and the grid of schedules, and that faulty schedules are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.lowering import assign_slots, forward_order, insert_waits, issue_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_by_stride
from perf_model.schedule.schedule import Schedule, format_grid
from perf_model.schedule.workload import Range, Unit, Workload
from tests.model.mutations import with_one_action_dropped, with_one_action_repeated, without_one_wait
from tests.model.schedule_text import parse_schedule
from tests.model.strategies import plans, schedules


def streamed(placements: tuple[Placement, ...]) -> list[int]:
    """Return the indices of the streamed units."""
    return [index for index, placement in enumerate(placements) if placement is Placement.STREAMED]


def test_stride_streams_the_units_that_the_paper_streams() -> None:
    workload = Workload.from_numels([10] * 7)
    assert streamed(place_by_stride(workload, 2)) == [1, 3, 5]
    assert streamed(place_by_stride(workload, 3)) == [2, 5]
    assert streamed(place_by_stride(workload, 7)) == [6]
    assert streamed(place_by_stride(workload, 8)) == []
    assert streamed(place_by_stride(Workload.from_numels([10]), 2)) == []


def test_actions_are_written_in_the_documented_format() -> None:
    assert str(Action(ActionKind.PREFETCH, 3)) == "PREFETCH 3"
    assert str(Action(ActionKind.PREFETCH, 3, 0, ("FLUSH_STATES 1",))) == "PREFETCH 3 slot 0 after FLUSH_STATES 1"


CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT


WORKLOAD = Workload.from_numels([100, 100, 100, 60])


MIXED = (CPU, STREAMED, STREAMED, CPU)


def lines(text: str) -> list[str]:
    """Return the lines of ``text`` without their indentation."""
    return [line.strip() for line in text.strip().splitlines()]


@given(plans(may_be_eager=True, may_be_on_disk=True))
def test_every_plan_is_lowered_to_a_safe_schedule(plan: UpdatePlan) -> None:
    assert check(plan.schedule, plan.workload) == plan.placements


@given(schedules(may_be_eager=True, may_be_on_disk=True))
def test_every_wait_is_needed(drawn: tuple[Schedule, Workload]) -> None:
    schedule, workload = drawn
    check(schedule, workload)
    for fault, mutant in without_one_wait(schedule):
        note(fault)
        with pytest.raises(ScheduleError, match="may start before"):
            check(mutant, workload)


@given(schedules(may_be_eager=True, may_be_on_disk=True))
def test_dropped_and_repeated_actions_are_refused(drawn: tuple[Schedule, Workload]) -> None:
    schedule, workload = drawn
    for fault, mutant in (*with_one_action_dropped(schedule), *with_one_action_repeated(schedule)):
        note(fault)
        with pytest.raises(ScheduleError):
            check(mutant, workload)


@given(plans(may_be_eager=True))
def test_there_are_at_most_as_many_slots_as_streamed_units(plan: UpdatePlan) -> None:
    streamed = [
        unit.numel
        for unit, placement in zip(plan.workload.units, plan.placements, strict=True)
        if placement is STREAMED
    ]
    assert plan.schedule.num_slots == min(plan.num_slots, len(streamed))
    assert plan.schedule.slot_numel == max(streamed, default=0)


def test_fingerprints_of_different_plans_differ() -> None:
    plan = UpdatePlan(workload=WORKLOAD, placements=MIXED, num_slots=2)
    assert plan.fingerprint == UpdatePlan(workload=WORKLOAD, placements=MIXED, num_slots=2).fingerprint
    others = [
        UpdatePlan(workload=WORKLOAD, placements=MIXED, num_slots=1),
        UpdatePlan(workload=WORKLOAD, placements=MIXED[::-1], num_slots=2),
        UpdatePlan(workload=Workload.from_numels([100, 100, 100, 61]), placements=MIXED, num_slots=2),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 3 + (MIXED[::-1] != MIXED)


@pytest.mark.parametrize(
    ("placements", "num_slots", "message"),
    [((CPU,), 1, "4 units, found 1 placements"), (MIXED, 0, "at least 1 slot, found 0")],
)
def test_a_plan_without_slots_or_with_missing_placements_is_refused(
    placements: tuple[Placement, ...], num_slots: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        UpdatePlan(workload=WORKLOAD, placements=placements, num_slots=num_slots)


@pytest.mark.parametrize("unit", [0, 2])
def test_a_persistent_or_streamed_unit_is_not_eager(unit: int) -> None:
    persistent = Unit(0, (Range(0, 0, 9),), is_persistent=True)
    workload = Workload((persistent, *(Unit(index, (Range(index, 0, 9),)) for index in (1, 2))))
    with pytest.raises(ValueError, match=rf"is eager, found \[{unit}\]"):
        UpdatePlan(workload=workload, placements=(CPU, CPU, STREAMED), num_slots=1, eager=frozenset({1, unit}))


# The lowering passes, each with the expected result


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
    updates = [action.unit for action in ordered.schedule.actions if action.kind is ActionKind.GPU_STEP]
    assert updates == [index for index in order if plan.placements[index] is not CPU]


@pytest.mark.parametrize("order", [(), (0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4)])
def test_an_order_that_does_not_name_each_unit_once_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="names each of its 4 units once, found"):
        UpdatePlan(workload=WORKLOAD, placements=MIXED, num_slots=1, order=order)


def test_slots_are_assigned_round_robin() -> None:
    assert assign_slots([1, 4, 2], 2) == {1: 0, 4: 1, 2: 0}


def test_issue_order_updates_on_the_cpu_first_and_prefetches_ahead() -> None:
    actions = issue_order([1, 0, 2, 3], MIXED, {1: 0, 2: 0})
    assert [str(action) for action in actions] == lines(
        """
        CPU_STEP 0
        PUBLISH 0
        CPU_STEP 3
        PUBLISH 3
        PREFETCH 1 slot 0
        GPU_STEP 1 slot 0
        FLUSH_STATES 1 slot 0
        PREFETCH 2 slot 0
        GPU_STEP 2 slot 0
        FLUSH_STATES 2 slot 0
        """
    )


def test_only_waits_that_lane_order_does_not_imply_are_inserted() -> None:
    actions = insert_waits(issue_order([1, 0, 2, 3], MIXED, {1: 0, 2: 0}))
    assert [str(action) for action in actions] == lines(
        """
        CPU_STEP 0
        PUBLISH 0 after CPU_STEP 0
        CPU_STEP 3
        PUBLISH 3 after CPU_STEP 3
        PREFETCH 1 slot 0
        GPU_STEP 1 slot 0 after PREFETCH 1
        FLUSH_STATES 1 slot 0 after GPU_STEP 1
        PREFETCH 2 slot 0 after FLUSH_STATES 1
        GPU_STEP 2 slot 0 after PREFETCH 2
        FLUSH_STATES 2 slot 0 after GPU_STEP 2
        """
    )


def test_an_eager_unit_is_speculated_committed_and_published() -> None:
    actions = UpdatePlan(workload=WORKLOAD, placements=MIXED, num_slots=1, eager=frozenset({3})).schedule.actions
    assert [str(action) for action in actions[:5]] == lines(
        """
        CPU_STEP 0
        PUBLISH 0 after CPU_STEP 0
        SPECULATE 3
        COMMIT 3
        PUBLISH 3 after COMMIT 3
        """
    )


# Schedules that must be refused, each with its failing action


def schedule(text: str, num_slots: int = 1) -> Schedule:
    """Return the schedule of these actions, one per line, in slots of 100 parameters."""
    return parse_schedule(text, num_slots, slot_numel=100)


STREAMED_CHAIN = "PREFETCH 0 slot 0\nGPU_STEP 0 slot 0 after PREFETCH 0\nFLUSH_STATES 0 slot 0 after GPU_STEP 0"


@pytest.mark.parametrize(
    ("text", "numels", "rule", "marked"),
    [
        ("CPU_STEP 0\nPUBLISH 0", [9], "PUBLISH 0 may start before CPU_STEP 0", "PUBLISH 0"),
        ("PUBLISH 0 after CPU_STEP 0\nCPU_STEP 0", [9], "in that order; found PUBLISH CPU_STEP", "CPU_STEP 0"),
        ("CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0", [9, 9], "Unit 1 .* found nothing", None),
        ("CPU_STEP 0\nPUBLISH 0 after CPU_STEP 9", [9], "CPU_STEP 9 was not", "PUBLISH 0"),
        (
            "CPU_STEP 0\nCPU_STEP 1 after CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0\nPUBLISH 1 after CPU_STEP 1",
            [9, 9],
            "A wait names an action of another lane; CPU_STEP 0 is on the same",
            "CPU_STEP 1",
        ),
        (
            "COMMIT 0\nSPECULATE 0\nPUBLISH 0 after COMMIT 0",
            [9],
            "in that order; found COMMIT SPECULATE PUBLISH",
            "PUBLISH 0",
        ),
        ("SPECULATE 0\nPUBLISH 0 after SPECULATE 0", [9], "SPECULATE COMMIT PUBLISH, in that order", "PUBLISH 0"),
        ("SPECULATE 0\nCOMMIT 0", [9], "in that order; found SPECULATE COMMIT", "COMMIT 0"),
        (
            "SPECULATE 0\nCOMMIT 0\nPUBLISH 0 after SPECULATE 0",
            [9],
            "PUBLISH 0 may start before COMMIT 0",
            "PUBLISH 0",
        ),
        ("CPU_STEP 7\nPUBLISH 7 after CPU_STEP 7", [9], "There are 1 units", "CPU_STEP 7"),
        (
            "CPU_STEP 0 slot 0\nPUBLISH 0 after CPU_STEP 0",
            [9],
            "Only a streamed unit and one on disk use a slot",
            "CPU_STEP 0",
        ),
        (STREAMED_CHAIN, [101], "A slot holds 100 parameters; unit 0 has 101", "PREFETCH 0"),
        (STREAMED_CHAIN.replace("slot 0", "slot 1"), [9], "needs one of 1 slots", "PREFETCH 0"),
        (STREAMED_CHAIN.replace(" slot 0", ""), [9], "needs one of 1 slots", "PREFETCH 0"),
        (
            STREAMED_CHAIN
            + "\n"
            + STREAMED_CHAIN.replace("_STEP 0", "_STEP 1").replace("TES 0", "TES 1").replace("FETCH 0", "FETCH 1"),
            [9, 9],
            "PREFETCH 1 may start before FLUSH_STATES 0",
            "PREFETCH 1",
        ),
    ],
)
def test_a_faulty_schedule_is_refused_and_its_failing_action_is_marked(
    text: str, numels: list[int], rule: str, marked: str | None
) -> None:
    with pytest.raises(ScheduleError, match=rule) as caught:
        check(schedule(text), Workload.from_numels(numels))
    rows = [row for row in str(caught.value).splitlines() if row.startswith(">")]
    assert [re.search(r"[A-Z_]+ \d+", row).group() for row in rows] == ([] if marked is None else [marked])


def test_a_unit_that_changes_its_slot_is_refused() -> None:
    text = STREAMED_CHAIN.replace("FLUSH_STATES 0 slot 0", "FLUSH_STATES 0 slot 1")
    with pytest.raises(ScheduleError, match="stays in the slot"):
        check(schedule(text, num_slots=2), Workload.from_numels([9]))


@given(schedules(may_be_eager=True), st.integers(-3, -1))
def test_negative_units_and_slots_are_refused(drawn: tuple[Schedule, Workload], number: int) -> None:
    """Check negative indices, which Python would count from the end: two slots could be taken for one."""
    schedule, workload = drawn
    for position, action in enumerate(schedule.actions):
        wrong = [replace(action, unit=number)]
        if action.slot is not None:
            wrong.append(replace(action, slot=number))
        for mutant in wrong:
            actions = (*schedule.actions[:position], mutant, *schedule.actions[position + 1 :])
            with pytest.raises(ScheduleError):
                check(replace(schedule, actions=actions), workload)
    in_negative_slots = tuple(
        action if action.slot is None else replace(action, slot=action.slot - schedule.num_slots)
        for action in schedule.actions
    )
    if in_negative_slots != schedule.actions:
        with pytest.raises(ScheduleError, match="needs one of"):
            check(replace(schedule, actions=in_negative_slots), workload)


def test_grid_has_one_column_per_lane_and_one_row_per_action() -> None:
    plan = UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=1)
    head, *rows = format_grid(plan.schedule).splitlines()
    assert head.split() == ["#", "h2d", "compute", "d2h", "cpu", "publish", "after"]
    assert len(rows) == len(plan.schedule.actions)
    columns = {action.kind: head.index(action.lane.value) for action in plan.schedule.actions}
    for row, action in zip(rows, plan.schedule.actions, strict=True):
        assert row[columns[action.kind] :].startswith(action.name)
