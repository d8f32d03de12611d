"""Test that simulating many plans at once gives the times that simulating them one by one gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.cost import CostModel
from perf_model.prediction.lane_queues import encode
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.simulate_many import ManySimulator
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.model.costs import cost, costs, windows
from tests.model.strategies import workloads


@st.composite
def plans_of_one_workload(draw: st.DrawFn) -> list[UpdatePlan]:
    """Draw up to 8 plans in forward's order for the same units, some of which are equally long."""
    lengths = draw(st.lists(st.integers(1, 10**8), min_size=1, max_size=3))
    workload = draw(workloads(draw(st.lists(st.sampled_from(lengths), min_size=1, max_size=14))))
    count = len(workload.units)
    placements = st.lists(st.sampled_from(Placement), min_size=count, max_size=count).map(tuple)
    pairs = draw(st.lists(st.tuples(placements, st.integers(1, 6)), min_size=1, max_size=8))
    return [UpdatePlan(workload=workload, placements=placed, num_slots=slots) for placed, slots in pairs]


@given(plans_of_one_workload(), costs, windows)
def test_many_plans_at_once_take_as_long_as_one_by_one(
    plans: list[UpdatePlan], model: CostModel, overlap: Windows
) -> None:
    workload = plans[0].workload
    codes, slots = encode([plan.placements for plan in plans]), np.array([plan.num_slots for plan in plans])
    times = ManySimulator(workload, model, overlap).run(codes, slots)
    for plan, many_exposed_s, many_active_s in zip(plans, times.exposed_s, times.active_s, strict=True):
        timeline = simulate(plan.schedule, workload, model, overlap)
        assert many_exposed_s == pytest.approx(overlap.exposed_s(timeline, workload, model), rel=1e-9, abs=1e-12)
        assert many_active_s == pytest.approx(timeline.active_s, rel=1e-9, abs=1e-12)


def test_latency_that_counts_as_work_hardly_changes_the_times() -> None:
    """Compare plans of 320 units of 20 M parameters: the latencies are 0.5 % of the work of the copies."""
    workload, model = Workload.from_numels([2 * 10**7] * 320), cost(latency=3e-5)
    random, overlap = np.random.default_rng(0), Windows(backward_s=0.5, forward_s=0.5)
    codes, slots = random.choice(len(Placement), (8, 320), p=(0.3, 0.5, 0.2)), np.full(8, 3)
    exact = ManySimulator(workload, model, overlap).run(codes, slots)
    approximate = ManySimulator(workload, model, overlap, latency_is_work=True).run(codes, slots)
    np.testing.assert_allclose(approximate.exposed_s, exact.exposed_s, rtol=0.01)
    assert (approximate.exposed_s != exact.exposed_s).all()


def test_a_plan_that_exposes_too_much_is_not_simulated_to_the_end() -> None:
    workload, overlap = Workload.from_numels([10**8] * 12), Windows(backward_s=0.1, forward_s=0.2)
    every = [(placement,) * 12 for placement in Placement]
    simulator = ManySimulator(workload, cost(), overlap)
    exposed_s = simulator.run(encode(every), np.full(3, 2)).exposed_s
    limit_s = float(sorted(exposed_s)[1])
    limited_s = simulator.run(encode(every), np.full(3, 2), enough_s=limit_s).exposed_s
    assert np.array_equal(limited_s, np.where(exposed_s < limit_s, exposed_s, np.inf))
    assert simulator.simulated == 6


def test_plans_that_end_early_keep_their_times_while_others_of_the_batch_go_on() -> None:
    """Use plans with one to five events per unit, so that they end in different rounds of the loop."""
    count, overlap = 60, Windows(backward_s=0.05, forward_s=0.2)
    simulator = ManySimulator(Workload.from_numels([10**7, 2 * 10**7] * (count // 2)), cost(latency=1e-4), overlap)
    plans = encode([(Placement.RESIDENT,) * kept + (Placement.STREAMED,) * (count - kept) for kept in range(count + 1)])
    slots = np.full(len(plans), 2)
    together = simulator.run(plans, slots)
    for row, exposed_s, active_s in zip(plans, together.exposed_s, together.active_s, strict=True):
        alone = simulator.run(row[None], slots[:1])
        assert (exposed_s, active_s) == (alone.exposed_s[0], alone.active_s[0])
