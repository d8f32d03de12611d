"""What callers of DeepSpeed do with ZeRO-3, and its own unit tests expect, is with the plugin what it is with stock."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

MODULES = ("backwards", "steps", "states", "experts")
SCENARIOS = (
    "backward_of_the_tensor",
    "backward_of_the_scaled_loss",
    "gradients_not_scaled_by_accumulation",
    "backwards_without_a_step",
    "boundaries_that_the_caller_sets",
    "coalesced_reduction",
    "what_zero_3_refuses",
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
    "optimizers_that_the_caller_makes",
    "sub_groups_of_every_size",
    "fragments",
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
)


class Results:
    """Runs all scenarios of a world size when the first of them is asked for."""

    def __init__(self) -> None:
        self._by_world_size: dict[int, list[dict[str, Any]]] = {}

    def of(self, world_size: int) -> list[dict[str, Any]]:
        """One by name for each rank."""
        if world_size not in self._by_world_size:
            results = self._by_world_size[world_size] = []
            for finished in run_ranks(world_size, ["-m", "tests.zero.scripts.behaviour", *MODULES], timeout_s=500):
                assert finished.returncode == 0, finished.output[-5000:]
                results.append({answer["name"]: answer for answer in finished.answers()})
        return self._by_world_size[world_size]


# One worker of pytest-xdist runs all of a world size, once.
WORLD_SIZES = (
    pytest.param(2, marks=pytest.mark.xdist_group("behaviour of 2")),
    pytest.param(1, marks=[pytest.mark.xdist_group("behaviour of 1"), pytest.mark.thorough]),
)


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_callers_see_what_they_see_with_stock(name: str, world_size: int, results: Results) -> None:
    for rank, by_name in enumerate(results.of(world_size)):
        assert by_name.keys() == set(SCENARIOS)
        assert by_name[name]["differences"] == [], f"rank {rank}"
        assert by_name[name]["seen"] > 3
