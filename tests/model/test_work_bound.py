"""Test the lower bound of an update: against results by hand, and against plans, none of which may beat it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.work_bound import work_bound
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from tests.model.costs import cost, costs, windows
from tests.model.strategies import plans, schedules

WORKLOAD = Workload.from_numels([10**6] * 1000)
A_SLOT = 12 * 10**6
"""The bytes of a slot of these units."""

SUMS = TrainingSetup(accumulates=True)
"""All gradients are on the accelerator, 2 GB."""

ONLY_STREAMED = 2 * 10**9 + A_SLOT
"""GPU memory for all gradients and for a thousandth of the states."""

NOT_ABOVE = 1 - 1e-6
"""A factor that allows for the rounding of sums in another order."""

setups = st.builds(
    TrainingSetup,
    widths=st.builds(Widths, param=st.just(2), grad=st.sampled_from([2, 4]), publishes=st.booleans()),
    accumulates=st.booleans(),
    sums_on_accelerator=st.sampled_from([None, True, False]),
    params_on_host=st.booleans(),
)


@given(schedules(10**8), costs, windows)
def test_no_schedule_beats_the_bound_of_unlimited_memory(
    drawn: tuple[Schedule, Workload], model: CostModel, overlap: Windows
) -> None:
    schedule, workload = drawn
    timeline = simulate(schedule, workload, model, overlap)
    assert timeline.active_s >= work_bound(workload, model, None).seconds * NOT_ABOVE


@given(plans(10**8), costs, windows, setups)
def test_no_plan_beats_the_bound_of_its_gpu_memory(
    plan: UpdatePlan, model: CostModel, overlap: Windows, setup: TrainingSetup
) -> None:
    bound = work_bound(plan.workload, model, memory_of(plan, setup).gpu_bytes, setup)
    timeline = simulate(plan.schedule, plan.workload, model, overlap)
    assert timeline.active_s >= bound.seconds * NOT_ABOVE


@given(costs, st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_gpu_memory_never_raises_the_bound(model: CostModel, gpu_bytes: int, more_bytes: int) -> None:
    less, more = (work_bound(WORKLOAD, model, allowed).seconds for allowed in (gpu_bytes, gpu_bytes + more_bytes))
    assert more <= less * (1 + 1e-6)


def test_without_gpu_memory_the_cpu_updates_everything() -> None:
    # 1 s of updates, and 2 GB to the accelerator at 12 GB/s at the same time.
    bound = work_bound(WORKLOAD, cost(), 0)
    assert (bound.seconds, bound.binding) == (pytest.approx(1.0), Resource.CPU)
    assert work_bound(WORKLOAD, cost().without_accelerator(), None) == bound
    assert work_bound(WORKLOAD, cost(), A_SLOT - 1) == bound, "not even a slot fits"
    slow_link = work_bound(WORKLOAD, cost(h2d=1e9), 0)
    assert (slow_link.seconds, slow_link.binding) == (pytest.approx(2.0), Resource.H2D)


def test_streaming_and_the_cpu_share_the_work() -> None:
    # With the share x on the CPU, 12 (1 - x) + 2 x GB go to the accelerator at 12 GB/s, in the x seconds of the CPU.
    shared = work_bound(WORKLOAD, cost(), ONLY_STREAMED, SUMS)
    assert shared.seconds == pytest.approx(12 / 22, rel=0.002)
    assert shared.binding in (Resource.H2D, Resource.CPU), "both are busy until the end"
    # 12 GB to the accelerator and back.
    streamed = work_bound(WORKLOAD, cost(cpu=1e3, d2h=4e9), ONLY_STREAMED, SUMS)
    assert (streamed.seconds, streamed.binding) == (pytest.approx(3.0, rel=0.002), Resource.D2H)
    assert work_bound(WORKLOAD, cost(dram=1e9), ONLY_STREAMED, SUMS).binding is Resource.DRAM


def test_residents_relieve_every_resource_but_the_gpu() -> None:
    half = work_bound(WORKLOAD, cost(), 2 * 10**9 + 6 * 10**9, SUMS)
    assert half.seconds == pytest.approx(12 / 22 / 2, rel=0.002)
    # The GPU is ten times as fast as the CPU: each gets its share.
    assert work_bound(WORKLOAD, cost(gpu=1e10), None).seconds == pytest.approx(1 / 11)


def test_gradients_take_memory_from_residents_and_limit_what_is_streamed() -> None:
    # Without accumulation, a resident parameter takes 14 bytes.
    on_gpu_alone = cost(cpu=1e9, h2d=1e6, d2h=1e6)
    assert work_bound(WORKLOAD, cost(h2d=1e15, d2h=1e6), 7 * 10**9).seconds == pytest.approx(0.5, rel=0.002)
    with_sums = work_bound(WORKLOAD, cost(h2d=1e15, d2h=1e6), 8 * 10**9, SUMS)
    assert with_sums.seconds == pytest.approx(0.5, rel=0.002)
    assert work_bound(WORKLOAD, on_gpu_alone, 10**9, SUMS).seconds == work_bound(WORKLOAD, on_gpu_alone, 0).seconds
    # A streamed parameter takes 2 bytes: with 0.5 GB, a quarter of them can be streamed.
    assert work_bound(WORKLOAD, cost(h2d=1e15, d2h=1e15), 5 * 10**8).seconds == pytest.approx(0.75, rel=0.002)
