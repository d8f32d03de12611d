"""Test plans for known machines and models: annealing gains little over them, and so does no simple rule."""

from __future__ import annotations

from functools import cache

import pytest

from perf_model import planner
from perf_model.planner import MAX_UNITS, UNIT_SIZES, PlannedUpdate, evaluate, plan_units
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all, place_by_stride
from perf_model.schedule.workload import Workload
from tests.model.annealing import anneal
from tests.model.costs import cost
from tests.model.window_settings import WindowSetting, all_settings, window_settings
from tests.tiers import thorough

SETTINGS = (
    WindowSetting(machine="h200-pcie5", model="20B", ranks=2, micro_batch=1, gpu_share=0.5),
    WindowSetting(machine="gh200", model="13B", ranks=1, micro_batch=1, gpu_share=1.0),
    WindowSetting(machine="a100-pcie4", model="7B", ranks=1, micro_batch=1, gpu_share=1.0),
    WindowSetting(machine="h100-pcie5", model="20B", ranks=4, micro_batch=1, gpu_share=0.5),
)
HIDES_ALMOST_EVERYTHING = WindowSetting(machine="gh200", model="10B", ranks=1, micro_batch=4, gpu_share=0.76)

# One worker of pytest-xdist plans for each setting, once.
pytestmark = pytest.mark.xdist_group("plans in windows")


@cache
def planned_for(setting: WindowSetting) -> tuple[int, PlannedUpdate]:
    return plan_units(setting.workload, UNIT_SIZES, setting.cost, setting.budgets, setting.windows, setting.job.setup)


def iteration_s(exposed_s: float, setting: WindowSetting) -> float:
    return setting.windows.backward_s + setting.windows.forward_s + exposed_s


@pytest.mark.promise("P5")
@pytest.mark.parametrize(
    "setting", [SETTINGS[0], *map(thorough, SETTINGS[1:3]), SETTINGS[3], HIDES_ALMOST_EVERYTHING], ids=str
)
def test_a_short_annealing_shortens_the_iteration_by_one_percent_at_most(setting: WindowSetting) -> None:
    _, planned = planned_for(setting)
    annealed = anneal(300, planned.plan, setting)
    assert annealed.simulations == 300
    assert iteration_s(planned.exposed_s, setting) <= 1.01 * iteration_s(annealed.exposed_s, setting)


def test_annealing_shortens_the_iteration_of_a_simple_rule() -> None:
    """Check that the comparison can fail."""
    setting = SETTINGS[3]
    workload = setting.workload(100_000_000)
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.CPU), num_slots=1)
    exposed_s = evaluate(plan, setting.cost, setting.windows, setting.job.setup).exposed_s
    assert iteration_s(exposed_s, setting) > 1.01 * iteration_s(anneal(300, plan, setting).exposed_s, setting)


@pytest.mark.promise("P5")
@pytest.mark.parametrize("setting", [*SETTINGS, HIDES_ALMOST_EVERYTHING], ids=str)
def test_no_simple_rule_shortens_the_iteration_by_one_percent_with_any_size(setting: WindowSetting) -> None:
    size, planned = planned_for(setting)
    assert planned.plan.workload == setting.workload(size)
    assert not setting.budgets.missing(planned.memory)
    least_s = planned.exposed_s
    for other_size in UNIT_SIZES[4:]:
        workload = setting.workload(other_size)
        placed = [place_all(workload, placement) for placement in Placement]
        for placements in (*placed, *(place_by_stride(workload, stride) for stride in (2, 3, 4))):
            for num_slots in (1, 2, 4):
                plan = UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
                fits = num_slots <= max(1, placements.count(Placement.STREAMED))
                if fits and not setting.budgets.missing(memory_of(plan, setting.job.setup)):
                    found = evaluate(plan, setting.cost, setting.windows, setting.job.setup)
                    least_s = min(least_s, found.exposed_s)
    assert iteration_s(planned.exposed_s, setting) <= 1.01 * iteration_s(least_s, setting)


@pytest.mark.parametrize("setting", [SETTINGS[0], thorough(SETTINGS[1]), thorough(SETTINGS[3])], ids=str)
def test_all_sizes_together_are_about_as_good_as_the_best_of_them(setting: WindowSetting) -> None:
    _, planned = planned_for(setting)
    best_s = min(
        plan_units(setting.workload, [size], setting.cost, setting.budgets, setting.windows, setting.job.setup)[
            1
        ].exposed_s
        for size in UNIT_SIZES
        if setting.workload(size).numel <= MAX_UNITS * size
    )
    assert iteration_s(planned.exposed_s, setting) <= 1.01 * iteration_s(best_s, setting)


@pytest.mark.parametrize(
    ("forward_s", "size"), [(5.0, 5_000_000), (10.0, 7_000_000), (100.0, 70_000_000), (10_000.0, 1_000_000_000)]
)
def test_units_are_the_largest_with_which_almost_nothing_is_exposed(forward_s: float, size: int) -> None:
    """Check a forward that hides all but the first unit, which the CPU updates. A thousandth of it is negligible."""
    found, planned = plan_on_the_cpu(forward_s)
    assert (found, planned.exposed_s) == (size, pytest.approx(size / 1e9 + 2 * size / 12e9))


def test_the_limit_of_simulations_ends_the_descent_and_not_the_choice_of_larger_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "MAX_SIMULATED_UNITS", 1)
    # Smaller units than those of the grid are not tried any more.
    assert [plan_on_the_cpu(forward_s)[0] for forward_s in (5.0, 100.0)] == [10_000_000, 70_000_000]


def plan_on_the_cpu(forward_s: float) -> tuple[int, PlannedUpdate]:
    """Return the size of the units and the plan for 2e9 parameters without GPU memory."""
    return plan_units(
        lambda size: Workload.from_numels([size] * (2 * 10**9 // size)),
        UNIT_SIZES,
        cost(),
        Budgets(gpu_bytes=0),
        Windows(forward_s=forward_s),
        DEFAULT_SETUP,
    )


def test_equal_units_have_about_the_best_counts_of_each_placement() -> None:
    """Check all counts: without a forward window, which of the equal units has a placement does not matter."""
    workload, budgets = Workload.from_numels([10**8] * 20), Budgets(gpu_bytes=8 * 10**9)
    model, windows = cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5), Windows()
    every_s = []
    for residents in range(21):
        for streamed in range(21 - residents):
            placements = (Placement.RESIDENT,) * residents + (Placement.STREAMED,) * streamed
            placements += (Placement.CPU,) * (20 - len(placements))
            for num_slots in range(1, 1 + min(4, max(1, streamed))):
                plan = UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
                if not budgets.missing(memory_of(plan)):
                    every_s.append(evaluate(plan, model, windows, DEFAULT_SETUP).exposed_s)
    _, planned = plan_units(lambda size: workload, [1], model, budgets, windows, DEFAULT_SETUP)
    assert set(planned.plan.placements) == set(Placement)
    assert planned.exposed_s <= 1.03 * min(every_s)


@pytest.mark.thorough
def test_settings_follow_the_rule_and_are_sixty() -> None:
    chosen = window_settings()
    assert len(set(chosen)) == 60
    assert {setting.machine for setting in chosen} == {"a100-pcie4", "h100-pcie5", "h200-pcie5", "gh200"}
    assert {setting.ranks for setting in chosen} == {1, 2, 4, 8}
    assert set(chosen) <= set(all_settings())
