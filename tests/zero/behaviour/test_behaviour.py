"""Check that callers see the same with the plugin as with stock, also in the scenarios of its unit tests."""

from __future__ import annotations

import pytest

from tests.tiers import thorough
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

MODULES = ("backwards", "steps", "states", "experts", "assigned")
SCENARIOS = (
    "backward_of_the_tensor",
    "backward_of_the_scaled_loss",
    "gradients_not_scaled_by_accumulation",
    "backwards_without_a_step",
    "boundaries_that_the_caller_sets",
    "coalesced_reduction",
    "calls_that_zero_3_refuses",
    "one_loss_of_several_engines",
    "recomputed_activations",
    "activation_checkpointing_of_deepspeed",
    "leaf_modules",
    "gradients_that_the_caller_clips",
    "invalid_norms",
    "gradients_that_the_caller_replaces",
    "loss_scales",
    "learning_rates",
    "schedulers",
    "optimizers_that_the_caller_creates",
    "sub_groups_of_every_size",
    "fragments",
    "moments_in_the_dtype_of_the_masters",
    "states_that_move",
    "partitions_that_the_caller_replaces",
    "one_engine_after_another",
    "nested_contexts",
    "generation",
    "no_optimizer",
    "reductions",
    "data_parallel_groups_of_an_mpu",
    "gradients_that_are_switched",
    "experts_of_every_rank",
    "experts_with_rules_by_name",
    "assigned_states",
    "states_assigned_before_a_skipped_step",
    "saved_states_that_were_assigned",
    "second_engines",
)


RANKS = ProgramRanks("tests.zero.behaviour.behaviour_ranks", timeout_s=500, arguments=lambda folder: MODULES)
WORLD_SIZES = (
    pytest.param(1, marks=on_one_worker(RANKS.program, 1)),
    # ``software_gpu/training/test_callers_on_device.py`` has some of the scenarios on two ranks.
    thorough(2, on_one_worker(RANKS.program, 2)),
)


@pytest.mark.promise("P1")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_callers_see_the_same_values_as_with_stock(name: str, world_size: int, trained: TrainingOnce) -> None:
    for rank, by_name in enumerate(trained.answers_by_name(world_size)):
        assert by_name.keys() == set(SCENARIOS)
        assert by_name[name]["differences"] == [], f"rank {rank}"
        assert by_name[name]["seen"] > 3
