"""Check that callers see the same with the plugin as with stock if masters, or also moments, are bf16."""

from __future__ import annotations

import pytest

from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from tests.tiers import thorough
from tests.zero.training_once import TrainingOnce, on_one_worker, selecting

PROGRAM = "tests.zero.behaviour.behaviour_ranks"
SCENARIOS = (
    "states.fragments",
    "states.states_that_move",
    "states.moments_in_the_dtype_of_the_masters",
    "steps.gradients_that_the_caller_clips",
    "steps.gradients_that_the_caller_replaces",
    "assigned.states_assigned_before_a_skipped_step",
    "assigned.second_engines",
)
SELECTIONS = {
    states: selecting(PROGRAM, "--states", states, *SCENARIOS, timeout_s=400)
    for states in WIDTHS_OF_STATES
    if states != "fp32"
}


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=on_one_worker(f"{PROGRAM} bf16", 1)), thorough(2, on_one_worker(f"{PROGRAM} bf16", 2))],
)
@pytest.mark.parametrize("states", SELECTIONS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_callers_see_the_same_values_as_with_stocks_bf16_states(
    name: str, states: str, world_size: int, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    for rank, by_name in enumerate(trained_by_selection[states].answers_by_name(world_size)):
        answer = by_name[name.partition(".")[2]]
        assert answer["differences"] == [], f"rank {rank}"
        assert answer["seen"] > 3
