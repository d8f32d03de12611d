"""Check the simulation: exactly in cases worked out by hand, and against lanes, waits and capacities everywhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from perf_model.prediction.cost import CostModel, DiskRates, Load, Resource, relative_speeds
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.slowdown import Slowdown
from perf_model.prediction.timeline import Phase
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.host_layout import SIXTEEN_BIT
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all, place_by_stride
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from tests.model.costs import cost, costs, makespan_s, windows
from tests.model.profiles import profile
from tests.model.schedule_text import parse_schedule
from tests.model.strategies import plans, schedules

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT


def plan(placements: tuple[Placement, ...], num_slots: int, numel: int = 10**9) -> UpdatePlan:
    """Return a plan of units that all have ``numel`` parameters."""
    return UpdatePlan(
        workload=Workload.from_numels([numel] * len(placements)), placements=placements, num_slots=num_slots
    )


def predicted_s(update_plan: UpdatePlan, model: CostModel) -> float:
    """Return the predicted seconds of the update without windows."""
    return makespan_s(simulate(update_plan.schedule, update_plan.workload, model))


# Cases by hand. A unit has 10^9 parameters. On the CPU its update takes 1 s and its publish 1/6 s; streamed, its
# prefetch takes 1 s, its update 1 ms, and its flush 1 s.


def test_cpu_updates_hide_every_publish_but_the_last() -> None:
    assert predicted_s(plan((CPU,) * 4, 1), cost()) == pytest.approx(4 + 1 / 6)


def test_one_slot_runs_in_series_and_two_overlap() -> None:
    assert predicted_s(plan((STREAMED,) * 4, 1), cost()) == pytest.approx(4 * (1 + 1e-3 + 1))
    # The third prefetch waits for the first flush. From then on, each direction takes one second per unit.
    assert predicted_s(plan((STREAMED,) * 4, 2), cost()) == pytest.approx(1 + 4 + 3e-3, abs=2e-3)


def test_directions_slow_each_other_by_their_joint_limit() -> None:
    # With a joint limit of 12 GB/s instead of 24, two overlapping seconds take twice as long.
    alone, together = (predicted_s(plan((STREAMED,) * 40, 4), cost(both=both)) for both in (24e9, 12e9))
    assert together / alone == pytest.approx(2, rel=0.05)


def test_host_memory_is_shared_by_updates_and_transfers() -> None:
    # The CPU step alone moves 28 GB/s, which is all the bandwidth. The bytes of the transfers add to its 12 s.
    mixed = plan(place_by_stride(Workload.from_numels([0] * 24), 2), 2)
    moved = 12 * (28 + 2) + 12 * (12 + 12)
    assert predicted_s(mixed, cost(dram=28e9)) >= moved / 28
    assert predicted_s(mixed, cost(dram=28e9)) > 1.4 * predicted_s(mixed, cost())


def test_each_copy_adds_its_latency() -> None:
    assert predicted_s(plan((STREAMED,), 1), cost(latency=0.1)) == pytest.approx(1 + 0.3 + 1e-3 + 1 + 0.3)


def test_a_publish_that_waits_for_the_cpu_holds_no_other_lane_back() -> None:
    text = """
        CPU_STEP 0
        PUBLISH 0 after CPU_STEP 0
        PREFETCH 1 slot 0
        GPU_STEP 1 slot 0 after PREFETCH 1
        FLUSH_STATES 1 slot 0 after GPU_STEP 1
    """
    timeline = simulate(parse_schedule(text, 1, 10**9), Workload.from_numels([10**9] * 2), cost())
    starts = {span.action.name: span.start_s for span in timeline.spans}
    assert starts["PREFETCH 1"] == 0
    assert starts["PUBLISH 0"] == pytest.approx(1)


def test_resident_units_wait_for_nothing() -> None:
    assert predicted_s(plan((RESIDENT,) * 4, 1), cost(gpu=1e9)) == pytest.approx(4)
    # CPU units are updated and published concurrently.
    assert predicted_s(plan((RESIDENT,) * 4 + (CPU,) * 4, 1), cost(gpu=1e9)) == pytest.approx(4 + 1 / 6)


def test_only_prefetches_start_in_backward() -> None:
    update_plan = plan((STREAMED,), 1)
    spans = simulate(update_plan.schedule, update_plan.workload, cost(), Windows(backward_s=0.75)).spans
    assert [span.start_s for span in spans] == pytest.approx([-0.75, 0.25, 0.251])
    assert spans[-1].end_s == pytest.approx(1.251)
    # If the window is longer than the prefetch, the prefetch runs in the tail of backward.
    spans = simulate(update_plan.schedule, update_plan.workload, cost(), Windows(backward_s=2.0)).spans
    assert [span.start_s for span in spans] == pytest.approx([-1.0, 0.0, 1e-3])


def test_backward_hides_the_prefetches_that_fill_the_slots_and_no_others() -> None:
    update_plan = plan((CPU, *(STREAMED,) * 4), 3)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost(), Windows(backward_s=100.0))
    starts_s = [span.start_s for span in timeline.spans if span.action.kind is ActionKind.PREFETCH]
    assert starts_s[:3] == pytest.approx([-3.0, -2.0, -1.0])
    assert starts_s[3] == pytest.approx(1.001), "after the first is flushed"


def test_forward_hides_updates_that_it_does_not_need_yet() -> None:
    # The units are published after 7/6 and 13/6 s. Forward needs the first at once and the second when half of
    # forward is over.
    update_plan = plan((CPU,) * 2, 1)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost())
    for forward_s, exposed_s in ((0.0, 13 / 6), (0.5, 13 / 6 - 0.25), (2.0, 7 / 6), (10.0, 7 / 6)):
        found_s = Windows(forward_s=forward_s).exposed_s(timeline, update_plan.workload, cost())
        assert found_s == pytest.approx(exposed_s), forward_s


def test_phases_show_the_model_blocked_where_it_waits_for_the_update() -> None:
    # The units are published after 7/6 and 13/6 s. Each half of forward takes a quarter of a second.
    update_plan = plan((CPU,) * 2, 1)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost())
    overlap = Windows(backward_s=2.0, forward_s=0.5)
    phases = overlap.phases(timeline, update_plan.workload, cost())
    assert [span.phase for span in phases] == [
        Phase.BACKWARD, Phase.EXPOSED, Phase.FORWARD, Phase.EXPOSED, Phase.FORWARD
    ]  # fmt: skip
    assert [span.end_s for span in phases] == pytest.approx([0, 7 / 6, 7 / 6 + 0.25, 13 / 6, 13 / 6 + 0.25])
    # Without a window in backward, the flush must finish before the next backward.
    streamed = plan((STREAMED,), 1)
    timeline = simulate(streamed.schedule, streamed.workload, cost())
    phases = Windows(forward_s=0.25).phases(timeline, streamed.workload, cost())
    assert [span.phase for span in phases] == [Phase.EXPOSED, Phase.FORWARD, Phase.EXPOSED]
    assert [span.end_s for span in phases] == pytest.approx([1.001, 1.251, 2.001])


@pytest.mark.parametrize(
    ("backward_s", "phases", "exposed_s"),
    [
        # The prefetch needs all of backward, so that nothing is left for the flush, which ends at 0.251 + 1 s.
        (0.75, [(Phase.BACKWARD, 0), (Phase.EXPOSED, 0.251), (Phase.FORWARD, 0.501), (Phase.EXPOSED, 1.251)], 1.001),
        # Backward overlaps with half a second of the flush, and then prefetches.
        (
            1.5,
            [
                (Phase.BACKWARD, 0),
                (Phase.EXPOSED, 0.001),
                (Phase.FORWARD, 0.251),
                (Phase.BACKWARD, 0.751),
                (Phase.EXPOSED, 1.001),
            ],
            0.251,
        ),
        # Backward overlaps with the flush until it has ended.
        (
            9.0,
            [(Phase.BACKWARD, 0), (Phase.EXPOSED, 0.001), (Phase.FORWARD, 0.251), (Phase.BACKWARD, 1.001)],
            0.001,
        ),
    ],
)
def test_the_next_backward_hides_flushes_until_it_prefetches(
    backward_s: float, phases: list[tuple[Phase, float]], exposed_s: float
) -> None:
    update_plan = plan((STREAMED,), 1)
    overlap = Windows(backward_s=backward_s, forward_s=0.25)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost(), overlap)
    found = overlap.phases(timeline, update_plan.workload, cost())
    assert [span.phase for span in found] == [phase for phase, _ in phases]
    assert [span.end_s for span in found] == pytest.approx([end_s for _, end_s in phases])
    assert overlap.exposed_s(timeline, update_plan.workload, cost()) == pytest.approx(exposed_s)
    # Nothing overlaps with the next forward, and so nothing with the backward after it.
    in_step = Windows(backward_s=backward_s)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost(), in_step)
    assert in_step.exposed_s(timeline, update_plan.workload, cost()) == timeline.end_s


@pytest.mark.parametrize(
    ("h2d_and_d2h", "backward_s", "exposed_s"),
    [
        # Four prefetches fill the slots in all of backward. At the end of forward 3 s of flushes are left. The next
        # backward prefetches into each slot when it is flushed, 1 s after the one before.
        (2.0, 4.0, 0.001),
        # Both directions together reach three quarters, so that each runs at 0.75 beside the other. The flushes end
        # first, after 4 s, in which 3 s of prefetches are done. The fourth ends 1 s after the end of backward.
        (1.5, 4.0, 1.001),
        # The same in a backward that has half of that second.
        (1.5, 4.5, 0.501),
        (1.5, 5.0, 0.001),
    ],
)
def test_the_next_backward_prefetches_into_a_slot_as_soon_as_that_is_flushed(
    h2d_and_d2h: float, backward_s: float, exposed_s: float
) -> None:
    update_plan = plan((STREAMED,) * 4, 4)
    overlap = Windows(backward_s=backward_s, forward_s=1.0)
    model = cost(both=h2d_and_d2h * 12e9)
    timeline = simulate(update_plan.schedule, update_plan.workload, model, overlap)
    assert timeline.end_s == pytest.approx(4.001)
    found_s = overlap.exposed_s(timeline, update_plan.workload, model)
    assert found_s == pytest.approx(exposed_s)


def test_the_next_backward_hides_neither_updates_nor_the_copies_of_parameters() -> None:
    update_plan = plan((CPU, RESIDENT), 1)
    model = cost(gpu=1e8)
    timeline = simulate(update_plan.schedule, update_plan.workload, model, Windows(backward_s=20.0, forward_s=0.5))
    exposed_s = Windows(backward_s=20.0, forward_s=0.5).exposed_s(timeline, update_plan.workload, model)
    assert exposed_s == pytest.approx(10 - 0.25), "the GPU updates the second unit in 10 s"


@given(plans(10**9, may_be_eager=True), costs, windows)
def test_phases_are_contiguous_and_have_the_lengths_of_backward_forward_and_exposed_time(
    update_plan: UpdatePlan, model: CostModel, overlap: Windows
) -> None:
    timeline = simulate(update_plan.schedule, update_plan.workload, model, overlap)
    phases = overlap.phases(timeline, update_plan.workload, model)
    for before, after in pairwise(phases):
        assert before.end_s == after.start_s
        assert before.phase is not after.phase

    def lasts_s(phase: Phase) -> float:
        return sum(span.end_s - span.start_s for span in phases if span.phase is phase)

    assert sum(span.end_s - span.start_s for span in phases if span.start_s < 0.0) == overlap.backward_s
    assert all(span.phase is Phase.BACKWARD or not span.start_s < 0.0 for span in phases), (
        "only backward is before the update"
    )
    assert lasts_s(Phase.FORWARD) == pytest.approx(overlap.forward_s, abs=1e-9)
    exposed_s = overlap.exposed_s(timeline, update_plan.workload, model)
    assert lasts_s(Phase.EXPOSED) == pytest.approx(exposed_s, abs=1e-9)


def test_on_a_cpu_accelerator_an_update_takes_as_long_as_all_actions_together() -> None:
    """Check that copies and Adam share the same cores, so that they take the sum of their times."""
    rates = {
        "cpu_adam_params_per_s": 1e9,
        "stock_cpu_adam_params_per_s": 8e8,
        "dram_copy_bytes_per_s": 32e9,
        "dram_update_bytes_per_s": 30e9,
    }
    model = CostModel.from_profile(profile(rates))
    # A copied byte is one byte read and one written: copies reach 16 GB/s. Nothing is published.
    assert predicted_s(plan((CPU,) * 2, 1), model) == pytest.approx(2)
    assert predicted_s(plan((CPU, STREAMED), 1), model) == pytest.approx(1 + (12 / 16 + 1 + 12 / 16))
    assert predicted_s(plan((STREAMED,) * 2, 2), model) == pytest.approx(2 * (12 / 16 + 1 + 12 / 16))


def test_fair_sharing_slows_actions_equally_and_uses_the_whole_capacity() -> None:
    loads = [
        Load(1.0, {Resource.DRAM: 60.0}),
        Load(1.0, {Resource.DRAM: 60.0, Resource.H2D: 10.0}),
        Load(2.0, {Resource.D2H: 10.0}),
    ]
    capacities = {Resource.DRAM: 90.0, Resource.H2D: 100.0, Resource.D2H: 100.0}
    assert relative_speeds(loads, capacities) == pytest.approx([0.75, 0.75, 1.0])


def test_eager_units_are_updated_in_backward_as_soon_as_it_has_completed_them() -> None:
    # Backward completes a third of the parameters per second, the last unit first: units 2 and 1 at -2 and -1 s.
    eager = replace(plan((CPU,) * 3, 1), eager=frozenset({1, 2}))
    overlap = Windows(backward_s=3.0, forward_s=3.0)
    assert overlap.completed_s(eager.workload) == pytest.approx({0: 0.0, 1: -1.0, 2: -2.0})

    def starts_s(model: CostModel, windows: Windows, update_plan: UpdatePlan = eager) -> dict[str, float]:
        spans = simulate(update_plan.schedule, update_plan.workload, model, windows).spans
        return {span.action.name: span.start_s for span in spans}

    quick = starts_s(cost(cpu=2e9), overlap)
    assert quick == pytest.approx(
        {
            **{"CPU_STEP 0": 0.0, "SPECULATE 1": -1.0, "SPECULATE 2": -2.0, "COMMIT 1": 0.5, "COMMIT 2": 0.5},
            **{"PUBLISH 0": 0.5, "PUBLISH 1": 0.5 + 1 / 6, "PUBLISH 2": 0.5 + 2 / 6},
        }
    )
    # With 1.5 s each, unit 1 starts when unit 2 is done, and delays unit 0 by 1 s.
    slow = starts_s(cost(cpu=1 / 1.5e-9), overlap)
    assert (slow["SPECULATE 2"], slow["SPECULATE 1"], slow["CPU_STEP 0"]) == pytest.approx((-2.0, -0.5, 1.0))
    # With 2.5 s, unit 1 has not started at second 0, and follows in the order of the schedule.
    slower = starts_s(cost(cpu=4e8), overlap)
    assert (slower["SPECULATE 2"], slower["CPU_STEP 0"], slower["SPECULATE 1"]) == pytest.approx((-2.0, 0.5, 3.0))
    # Forward uses unit 2 first, so that unit 0 would be complete first.
    reverse = starts_s(cost(cpu=2e9), replace(overlap, first_use=(2, 1, 0)))
    assert (reverse["SPECULATE 1"], reverse["SPECULATE 2"]) == pytest.approx((-1.0, 0.5))
    # An update that ends inside of step() has no window.
    assert min(starts_s(cost(), Windows()).values()) == 0.0
    # Prefetches start as late as without eager units.
    mixed = replace(plan((CPU, STREAMED, CPU), 1), eager=frozenset({2}))
    assert starts_s(cost(), overlap, mixed)["PREFETCH 1"] == pytest.approx(-1.0)
    assert starts_s(cost(), overlap, mixed)["SPECULATE 2"] == pytest.approx(-2.0)


def test_eager_units_hide_in_backward_and_slow_it_down() -> None:
    eager = replace(plan((CPU,) * 3, 1), eager=frozenset({1, 2}))
    overlap = Windows(backward_s=3.0, forward_s=3.0, slowdown=Slowdown(cpu=0.25))
    timeline = simulate(eager.schedule, eager.workload, cost(cpu=2e9), overlap)
    # Beside two updates of half a second each, backward loses a quarter of each; forward waits for unit 0.
    assert overlap.added_time(timeline, eager.workload, cost()) == pytest.approx((0.5 + 1 / 6, 0.25))
    phases = overlap.phases(timeline, eager.workload, cost())
    assert (phases[0].start_s, phases[-1].end_s) == pytest.approx((-3.25, 3.0 + 0.5 + 1 / 6))
    in_step = replace(overlap, forward_s=0.0)
    assert in_step.added_time(timeline, eager.workload, cost()) == pytest.approx((0.5 + 3 / 6, 0.25))
    # Prefetches in the tail of backward, and a flush in the next one, slow it down also.
    streamed, slow_copies = plan((STREAMED,), 1), replace(overlap, forward_s=0.25, slowdown=Slowdown(copies=0.5))
    timeline = simulate(streamed.schedule, streamed.workload, cost(), slow_copies)
    assert slow_copies.added_time(timeline, streamed.workload, cost()) == pytest.approx((0.001, 0.5 + 0.25 + 0.25))


# Properties of every simulation


@given(schedules(may_be_eager=True, may_be_on_disk=True), costs, windows)
def test_a_simulation_respects_lanes_waits_windows_and_every_capacity(
    drawn: tuple[Schedule, Workload], model: CostModel, overlap: Windows
) -> None:
    schedule, workload = drawn
    model = model.with_disk(DiskRates(6e9, 5e9, 7e9), SIXTEEN_BIT)
    timeline = simulate(schedule, workload, model, overlap)
    assert tuple(span.action for span in timeline.spans) == schedule.actions
    ends = {span.action.name: span.end_s for span in timeline.spans}
    lane_ends = dict.fromkeys(Lane, -overlap.backward_s)
    completed_s = overlap.completed_s(workload)
    used = dict.fromkeys(Resource, 0.0)
    for span in timeline.spans:
        action, numel = span.action, workload.units[span.action.unit].numel
        load = model.load(action.kind, numel)
        assert span.start_s >= max((ends[name] for name in action.waits), default=-overlap.backward_s)
        if span.start_s < 0.0 and action.kind is ActionKind.SPECULATE:
            assert span.start_s >= completed_s[action.unit]
        else:
            assert span.start_s >= lane_ends[action.lane]
            assert span.start_s >= 0.0 or action.kind in (ActionKind.PREFETCH, ActionKind.READ)
        assert span.end_s - span.start_s >= load.total_s * (1 - 1e-6) - 1e-12
        lane_ends[action.lane] = max(span.end_s, lane_ends[action.lane])
        for resource, amount in load.amounts.items():
            used[resource] += amount
    for resource, amount in used.items():
        assert amount <= model.capacities[resource] * timeline.active_s * (1 + 1e-6), resource


def test_a_single_placement_takes_the_time_of_its_slowest_action() -> None:
    model = cost()
    for placement, seconds in ((CPU, 1.0), (STREAMED, 1.0)):
        update_plan = UpdatePlan(
            workload=Workload.from_numels([10**8] * 10),
            placements=place_all(Workload.from_numels([0] * 10), placement),
            num_slots=3,
        )
        assert predicted_s(update_plan, model) == pytest.approx(seconds, rel=0.25)
    assert model.load(ActionKind.CPU_STEP, 10**9).alone_s == pytest.approx(1.0)
