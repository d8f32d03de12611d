"""Test plans in windows of forward: about as good as annealing, never worse than simpler rules, with bounded effort."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.annealing import anneal
from benchmarks.planner.window_settings import WindowSetting, all_settings, window_settings
from perf_model.prediction.cost import CostModel
from perf_model.prediction.lane_queues import CODES, encode
from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import PlacementShares
from perf_model.search.budgets import Budgets
from perf_model.search.memory_check import MemoryCheck
from perf_model.search.moves import draw_moves
from perf_model.search.placement_search import PlacementSearch
from perf_model.search.planner import PlannedUpdate, plan_updates
from perf_model.search.ramps import Ramp, place_ramps, ramps, vary
from perf_model.search.starting_points import MAX_SLOTS
from perf_model.search.unit_sizes import UNIT_SIZES, plan_units
from perf_model.search.window_search import MAX_ROUNDS, PLANS_PER_ROUND, SCALES
from tests.model.costs import cost, costs
from tests.tiers import thorough

SETTINGS = (
    WindowSetting(machine="gh200", model="Llama-3-8B", ranks=1, micro_batch=1, gpu_share=1.0),
    WindowSetting(machine="gh200", model="13B", ranks=1, micro_batch=1, gpu_share=1.0),
    WindowSetting(machine="a100-pcie4", model="7B", ranks=1, micro_batch=1, gpu_share=1.0),
    WindowSetting(machine="h100-pcie5", model="20B", ranks=4, micro_batch=1, gpu_share=0.5),
)

FIXED_SIZE = 100_000_000

# One worker of pytest-xdist plans for each setting, once.
pytestmark = pytest.mark.xdist_group("plans in windows")


@cache
def planned_with_a_fixed_size(setting: WindowSetting) -> PlannedUpdate:
    return plan_updates(setting.workload(FIXED_SIZE), setting.cost, setting.budgets, setting.windows, setting.job.setup)


@cache
def planned_with_all_sizes(setting: WindowSetting) -> tuple[int, PlannedUpdate]:
    return plan_units(setting.workload, UNIT_SIZES, setting.cost, setting.budgets, setting.windows, setting.job.setup)


def without_places(setting: WindowSetting) -> UpdatePlan:
    """Return the plan of the search that ignores where in forward's order a unit is."""
    workload, setup = setting.workload(FIXED_SIZE), setting.job.setup
    return PlacementSearch(workload, setting.cost, setting.budgets, setting.windows, setup).run()


def exposed_s(plan: UpdatePlan, setting: WindowSetting) -> float:
    windows = setting.windows
    return windows.exposed_s(simulate(plan.schedule, plan.workload, setting.cost, windows), plan.workload, setting.cost)


@pytest.mark.promise("P5")
@pytest.mark.parametrize("setting", [SETTINGS[0], *map(thorough, SETTINGS[1:3]), SETTINGS[3]], ids=str)
def test_a_short_annealing_gains_at_most_three_percent(setting: WindowSetting) -> None:
    """Anneal with few simulations; ``python -m benchmarks planner`` anneals 60 settings for longer."""
    planned = planned_with_a_fixed_size(setting)
    annealed = anneal(300, planned.plan, setting)
    assert annealed.simulations == 300
    assert planned.exposed_s <= 1.03 * annealed.exposed_s


def test_a_short_annealing_gains_at_most_three_percent_where_forward_hides_almost_everything() -> None:
    """Use a setting in which a share of the CPU that is wrong by 3 % of the units doubles the exposed time."""
    setting = WindowSetting(machine="gh200", model="10B", ranks=1, micro_batch=4, gpu_share=0.76)
    _, planned = planned_with_all_sizes(setting)
    assert planned.exposed_s < 0.01 * setting.windows.forward_s
    annealed = anneal(60, planned.plan, setting)
    assert annealed.simulations == 60
    assert planned.exposed_s <= 1.03 * annealed.exposed_s


def test_annealing_improves_the_plan_of_a_search_that_ignores_places() -> None:
    """Check that the comparison can fail: without ``WindowSearch``, the last setting gains more than 3 %."""
    setting = SETTINGS[3]
    plan = without_places(setting)
    annealed = anneal(300, plan, setting)
    assert exposed_s(plan, setting) > 1.03 * annealed.exposed_s


@pytest.mark.parametrize("setting", [SETTINGS[0], *map(thorough, SETTINGS[1:3]), SETTINGS[3]], ids=str)
def test_places_never_make_a_plan_worse_than_shares_alone(setting: WindowSetting) -> None:
    planned = planned_with_a_fixed_size(setting)
    assert planned.exposed_s <= exposed_s(without_places(setting), setting) * (1 + 1e-9)
    assert planned.plan.order is None
    assert not setting.budgets.missing(planned.memory)


@pytest.mark.parametrize("setting", [SETTINGS[0], thorough(SETTINGS[2])], ids=str)
def test_all_sizes_together_are_planned_with_a_bounded_number_of_simulations(setting: WindowSetting) -> None:
    size, planned = planned_with_all_sizes(setting)
    assert planned.plan.workload == setting.workload(size)
    assert PLANS_PER_ROUND < planned.simulations <= 4500
    assert planned.exposed_s <= planned_with_a_fixed_size(setting).exposed_s * 1.03
    assert planned.exposed_s >= planned.exposed_bound.seconds * (1 - 1e-6)


def test_one_size_is_planned_with_a_bounded_number_of_simulations() -> None:
    assert planned_with_a_fixed_size(SETTINGS[0]).simulations <= (MAX_ROUNDS + 5) * PLANS_PER_ROUND


def test_a_size_between_those_of_the_list_is_chosen_if_it_is_better() -> None:
    setting = WindowSetting(machine="gh200", model="13B", ranks=2, micro_batch=1, gpu_share=0.5)
    size, planned = planned_with_all_sizes(setting)
    assert size not in UNIT_SIZES
    for listed in (max(filter(size.__gt__, UNIT_SIZES)), min(filter(size.__lt__, UNIT_SIZES))):
        other = plan_updates(setting.workload(listed), setting.cost, setting.budgets, setting.windows)
        assert planned.exposed_s < 0.99 * other.exposed_s


@pytest.mark.thorough
def test_smaller_units_are_planned_for_even_if_those_of_some_larger_size_do_not_help() -> None:
    """Use a setting in which 10 units of at most 5e8 are no better than 8 units, and 31 units are hidden entirely."""
    setting = WindowSetting(machine="a100-pcie4", model="10B", ranks=4, micro_batch=1, gpu_share=0.5)
    _, planned = planned_with_all_sizes(setting)
    few_units = plan_updates(
        setting.workload(500_000_000), setting.cost, setting.budgets, setting.windows, setting.job.setup
    )
    assert planned.exposed_s < 0.1 * few_units.exposed_s


def test_ramps_place_residents_first_and_cpu_units_late() -> None:
    workload = Workload.from_numels([10**8] * 20)
    chosen = list(ramps([10**8] * 20, PlacementShares(streamed=0.3, resident=0.4), streams=True))
    codes = place_ramps(chosen, workload, gpu_bytes=14 * 10**9, setup=TrainingSetup(accumulates=True))
    places = np.arange(20)
    assert any(ramp.cpu_share == pytest.approx(0.5) for ramp in chosen), "the share of the bound"
    for row, ramp in zip(codes, chosen, strict=True):
        residents, on_cpu = (places[row == CODES[placement]] for placement in (Placement.RESIDENT, Placement.CPU))
        if ramp.resident_power < 1:
            assert residents.tolist() == list(range(len(residents)))
            if ramp.cpu_power > 1 and len(on_cpu) > 0 and ramp.cpu_share <= 0.3:
                assert on_cpu.min() >= 10


def test_ramps_spread_streamed_units_evenly_after_the_residents() -> None:
    """Check that residents at the beginning do not push all streamed units to the end."""
    workload = Workload.from_numels([10**8] * 40)
    ramp = Ramp(num_slots=1, slot_numel=10**8, long_on_cpu=False, resident_power=0.001, cpu_share=0.75, cpu_power=1.0)
    (row,) = place_ramps([ramp], workload, gpu_bytes=25 * 14 * 10**8, setup=DEFAULT_SETUP)
    streamed = np.nonzero(row == CODES[Placement.STREAMED])[0]
    assert len(streamed) >= 3
    assert set(np.diff(streamed).tolist()) <= {3, 4, 5}


@given(
    st.lists(st.integers(10**5, 10**8), min_size=1, max_size=20),
    st.integers(0, 10**10),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_quick_check_of_memory_agrees_with_the_exact_one(
    numels: list[int], gpu_bytes: int, accumulates: bool, seed: int
) -> None:
    """Use lengths whose tensors share no segments, in which the order would make a difference."""
    rng = random.Random(seed)
    workload = Workload.from_numels([numel if numel * 4 > 10 * 2**20 else numel + 10**7 for numel in numels])
    widths = Widths(param=2, grad=rng.choice((2, 4)), splits_masters=rng.random() < 0.5)
    setup = TrainingSetup(widths=widths, accumulates=accumulates)
    placements = tuple(rng.choice(tuple(Placement)) for _ in numels)
    plan = UpdatePlan(workload=workload, placements=placements, num_slots=rng.randint(1, 4))
    # Gradients are half as long as the states, so some of them share segments: allow for one of each size.
    for slack in (-(22 * 2**20), 22 * 2**20):
        fits = MemoryCheck(workload, gpu_bytes + slack, setup).fits(encode([placements])[0], plan.num_slots)
        exact = memory_of(plan, setup).gpu_bytes <= gpu_bytes
        assert fits <= exact if slack < 0 else fits >= exact


@given(
    st.lists(st.integers(6 * 10**6, 10**8), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_quick_check_of_memory_is_exact_to_the_byte_if_no_tensors_share_segments(
    numels: list[int], accumulates: bool, params_on_host: bool, seed: int
) -> None:
    rng = random.Random(seed)
    workload = Workload.from_numels(numels)
    widths = Widths(param=2, grad=rng.choice((2, 4)), splits_masters=not params_on_host and rng.random() < 0.5)
    setup = TrainingSetup(widths=widths, accumulates=accumulates, params_on_host=params_on_host)
    placements = tuple(rng.choice(tuple(Placement)) for _ in numels)
    plan = UpdatePlan(workload=workload, placements=placements, num_slots=rng.randint(1, 4))
    taken_bytes = memory_of(plan, setup).gpu_bytes
    fits, too_little = (
        MemoryCheck(workload, gpu_bytes, setup).fits(encode([placements])[0], plan.num_slots)
        for gpu_bytes in (taken_bytes, taken_bytes - 1)
    )
    assert fits
    assert not too_little


@settings(max_examples=20)
@given(
    st.lists(st.integers(10**6, 10**8), min_size=11, max_size=25),
    costs,
    st.builds(Windows, backward_s=st.floats(0, 1), forward_s=st.floats(0.01, 1)),
    st.integers(0, 10**10),
)
def test_a_plan_in_windows_fits_and_exposes_what_is_predicted(
    numels: list[int], model: CostModel, overlap: Windows, gpu_bytes: int
) -> None:
    workload, budgets = Workload.from_numels(numels), Budgets(gpu_bytes=gpu_bytes)
    planned = plan_updates(workload, model, budgets, overlap)
    assert not budgets.missing(planned.memory)
    timeline = simulate(planned.plan.schedule, workload, model, overlap)
    assert planned.exposed_s == overlap.exposed_s(timeline, workload, model)
    on_cpu = PlacementSearch(workload, model, Budgets(gpu_bytes=0), overlap, DEFAULT_SETUP).run()
    on_cpu_s = overlap.exposed_s(simulate(on_cpu.schedule, workload, model, overlap), workload, model)
    assert planned.exposed_s <= on_cpu_s * (1 + 1e-9) + 1e-12


def test_without_a_rate_of_the_gpu_everything_is_updated_on_the_cpu() -> None:
    cpu_only = cost()
    on_cpu = {kind: cpu_only.per_param[kind] for kind in CHAINS[Placement.CPU]}
    workload = Workload.from_numels([10**7, 10**8] * 8)
    for gpu_bytes in (None, 10**10):
        model, budgets = replace(cpu_only, per_param=on_cpu), Budgets(gpu_bytes=gpu_bytes)
        planned = plan_updates(workload, model, budgets, Windows(forward_s=0.1))
        assert set(planned.plan.placements) == {Placement.CPU}


def test_a_plan_in_windows_has_no_slot_that_could_be_dropped() -> None:
    setting = SETTINGS[3]
    planned = planned_with_a_fixed_size(setting)
    for num_slots in range(1, planned.plan.num_slots):
        assert exposed_s(replace(planned.plan, num_slots=num_slots), setting) > planned.exposed_s


def test_varied_ramps_stay_in_range_and_differ_more_with_a_larger_scale() -> None:
    ramp = Ramp(num_slots=2, slot_numel=10**8, long_on_cpu=False, resident_power=1.0, cpu_share=0.9, cpu_power=1.0)
    streams_nothing = replace(ramp, num_slots=0, cpu_share=1.0)
    rng = random.Random(0)
    spread = {}
    for scale in SCALES:
        varied = [vary(ramp, scale, rng) for _ in range(200)]
        assert all(0.0 < other.cpu_share <= 1.0 and 1 <= other.num_slots <= MAX_SLOTS for other in varied)
        spread[scale] = np.std([other.cpu_power for other in varied])
        others = [vary(streams_nothing, scale, rng) for _ in range(20)]
        assert {(other.num_slots, other.cpu_share) for other in others} == {(0, 1.0)}
    assert spread[SCALES[0]] > 2 * spread[SCALES[1]]


def test_moves_change_only_what_they_name() -> None:
    codes = encode([[Placement.CPU, Placement.STREAMED, Placement.RESIDENT] * 5])[0]
    moves = draw_moves(codes, range(15), (0, 1, 2), random.Random(0))
    for _, move in zip(range(200), moves, strict=False):
        changed = set(np.nonzero(move.apply(codes) != codes)[0].tolist())
        assert changed <= set(move.indices)


def test_swaps_are_of_units_with_different_placements() -> None:
    """Check that no swap is in vain: most units of this plan are resident."""
    codes = encode([[Placement.RESIDENT] * 40 + [Placement.CPU] * 2])[0]
    moves = draw_moves(codes, range(42), (0, 2), random.Random(0))
    pairs = [move for _, move in zip(range(300), moves, strict=False) if len(move.indices) == 2]
    swaps = [move for move in pairs if move.codes[0] != move.codes[1]]
    assert len(swaps) > 100
    assert all((move.apply(codes) != codes).sum() == 2 for move in swaps)


@pytest.mark.thorough
def test_settings_follow_the_rule_and_are_sixty() -> None:
    chosen = window_settings()
    assert len(set(chosen)) == 60
    assert {setting.machine for setting in chosen} == {"a100-pcie4", "h100-pcie5", "h200-pcie5", "gh200"}
    assert {setting.ranks for setting in chosen} == {1, 2, 4, 8}
    assert set(chosen) <= set(all_settings())
