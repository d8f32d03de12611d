"""Check that measured seconds are explained by their causes, and that rates without evidence stay as they were."""

from __future__ import annotations

import random
from itertools import product

import pytest

from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.replanning.rates import CAUSES, EXPLAINED, PROFILED, Cause, RatesFit, RelativeRates
from perf_model.schedule.action import ActionKind
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.model.costs import cost

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
WORKLOAD = Workload.from_numels([5 * 10**7] * 24)
WINDOWS = Windows(backward_s=0.1, forward_s=0.1)
PROFILE = cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e9, latency=1e-5)
"""CPU updates and transfers together need more than the host memory bandwidth."""

MIXED = UpdatePlan(workload=WORKLOAD, placements=(CPU, STREAMED, CPU, RESIDENT) * 6, num_slots=2)
ALL_CPU = UpdatePlan(workload=WORKLOAD, placements=(CPU,) * 24, num_slots=1)


def seconds_by_kind(plan: UpdatePlan, true: CostModel) -> dict[ActionKind, float]:
    return simulate(plan.schedule, WORKLOAD, true, WINDOWS).seconds_by_kind()


def fit(plan: UpdatePlan, true: CostModel, before: RelativeRates = PROFILED) -> RelativeRates:
    return RatesFit(plan, PROFILE, WINDOWS, seconds_by_kind(plan, true), before).run()


CHANGES = [
    (cause, scale)
    for cause, scale in product(CAUSES[:5], (0.3, 0.6, 0.85, 1.5))
    # A little less host memory bandwidth mostly slows CPU Adam, so that it cannot be distinguished from fewer cores.
    if (cause, scale) != ((Resource.DRAM,), 0.85)
]


@pytest.mark.parametrize(("cause", "scale"), CHANGES, ids=str)
def test_a_changed_resource_is_found_from_the_seconds_that_it_changes(cause: Cause, scale: float) -> None:
    """Check the slowdown of other kinds, too: they are not mistaken for causes."""
    true = RelativeRates(scales={cause: scale})
    rates = fit(MIXED, true.apply(PROFILE))
    expected, usual = seconds_by_kind(MIXED, true.apply(PROFILE)), seconds_by_kind(MIXED, PROFILE)
    if all(expected[kind] == pytest.approx(kind_s, rel=EXPLAINED) for kind, kind_s in usual.items()):
        assert rates == PROFILED, "what changes nothing cannot be found"
    else:
        assert rates.scales == {cause: pytest.approx(scale, rel=0.06)}
        assert rates.kinds == {}


def test_two_causes_at_the_same_time_are_found() -> None:
    true = RelativeRates(scales={(Resource.CPU,): 0.5, (Resource.H2D,): 0.5})
    rates = fit(MIXED, true.apply(PROFILE))
    assert rates.scales == {cause: pytest.approx(scale, rel=0.06) for cause, scale in true.scales.items()}


def test_noise_within_the_medians_is_no_cause() -> None:
    noise = random.Random(0)
    for _ in range(20):
        measured = {kind: kind_s * noise.gauss(1, 0.009) for kind, kind_s in seconds_by_kind(MIXED, PROFILE).items()}
        assert RatesFit(MIXED, PROFILE, WINDOWS, measured).run() == PROFILED


def test_seconds_that_no_resource_explains_are_attributed_to_their_kind() -> None:
    """Check that slow publishes do not slow the prefetches, which use the same direction of the link."""
    measured = seconds_by_kind(MIXED, RelativeRates(kinds={ActionKind.PUBLISH: 3.0}).apply(PROFILE))
    rates = RatesFit(MIXED, PROFILE, WINDOWS, measured).run()
    explained = seconds_by_kind(MIXED, rates.apply(PROFILE))
    for kind, kind_s in measured.items():
        assert explained[kind] == pytest.approx(kind_s, rel=0.05), kind
    assert rates.relative(PROFILE)[ActionKind.PUBLISH] == pytest.approx(1 / 3, rel=0.1)
    assert rates.relative(PROFILE)[ActionKind.PREFETCH] == pytest.approx(1, rel=0.1)


def test_a_kind_that_is_not_executed_has_the_scale_of_the_resource_that_it_shares() -> None:
    """Check slow publishes: the prefetches, which nothing executes, use the same link."""
    rates = fit(ALL_CPU, RelativeRates(scales={(Resource.H2D,): 0.4}).apply(PROFILE))
    assert rates.relative(PROFILE)[ActionKind.PREFETCH] == pytest.approx(0.4, rel=0.05)


def test_a_kind_that_shares_nothing_slower_keeps_the_rate_of_the_profile() -> None:
    relative = fit(ALL_CPU, RelativeRates(scales={(Resource.CPU,): 0.5}).apply(PROFILE)).relative(PROFILE)
    assert relative.pop(ActionKind.CPU_STEP) == pytest.approx(0.5, rel=0.05)
    assert set(relative.values()) == {1.0}


def test_a_cause_remains_known_while_nothing_uses_the_resource() -> None:
    """Check that a CPU that was slow is not assumed to be fast as soon as it has no updates."""
    slow = RelativeRates(scales={(Resource.CPU,): 0.5}, kinds={ActionKind.PUBLISH: 1.2})
    streaming = UpdatePlan(workload=WORKLOAD, placements=(STREAMED,) * 24, num_slots=2)
    assert fit(streaming, PROFILE, slow) == slow
    assert fit(MIXED, PROFILE, slow) == PROFILED


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_factor_changes_the_seconds_of_one_kind_alone(factor: float) -> None:
    for kind in ActionKind:
        scaled = RelativeRates(kinds={kind: factor}).apply(PROFILE)
        for other in ActionKind:
            expected_s = PROFILE.load(other, 10**7).alone_s * (factor if other is kind else 1.0)
            assert scaled.load(other, 10**7).alone_s == pytest.approx(expected_s)


def test_measured_seconds_of_nothing_change_nothing() -> None:
    assert RatesFit(MIXED, PROFILE, WINDOWS, {}).run() == PROFILED
