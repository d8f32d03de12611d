"""Check that training beside tensor parallelism has the bits of stock, and that uneven shards are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.zero.tensor_parallel.cases import ARMS, CASES, QUICK, TensorParallelCase
from tests.zero.training_once import TrainingOnce, on_one_worker, selecting

PROGRAM = "tests.zero.tensor_parallel.tensor_parallel_ranks"
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"

SELECTIONS = {cases: selecting(PROGRAM, cases, timeout_s=900) for cases in ("quick", "all")}


def parameters() -> list[Any]:
    """Return a quick part of the cases at two ranks, and all of them at two and four ranks for the thorough tier."""
    quick = [(2, "quick", case) for case in QUICK]
    all_of_them = [(world_size, "all", case) for world_size in (2, 4) for case in CASES]
    return [
        pytest.param(
            *found,
            id=f"{found[0]} ranks, {found[2].name}",
            marks=[
                on_one_worker(f"{PROGRAM} {found[1]}", found[0]),
                *([pytest.mark.thorough] if found[1] == "all" else []),
            ],
        )
        for found in (*quick, *all_of_them)
    ]


@pytest.mark.promise("P1")
@pytest.mark.parametrize(("world_size", "cases", "case"), parameters())
def test_training_beside_tensor_parallelism_has_the_bits_of_stock(
    world_size: int, cases: str, case: TensorParallelCase, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    for rank, by_name in enumerate(trained_by_selection[cases].answers_by_name(world_size)):
        found = by_name[case.name]
        assert found["classes"] == [STOCK, *[OURS] * len(ARMS)]
        assert found["differences"] == {arm: [] for arm in ARMS}, f"rank {rank}"
        numbers = found["numbers"]
        assert len(numbers["step"]) >= 3, "a case must have several sub-groups"
        assert found["masters"] >= 14
        if case.layout == "AutoTP" and case.zero_init:
            unplanned = found["planned elements"] - found["elements"]
            assert 0 <= unplanned <= found["elements of norms"], "`plan --tensor-parallel` plans for another model"
        if case.setting != "plain":
            assert any(0.1 < norm < float("inf") for norm in numbers["norm"]), "clipping was never active"
        assert numbers["skipped"][-1] == (case.dtype == "fp16"), "the overflow on one rank skips one step on all"


@pytest.mark.promise("P6")
def test_shards_of_different_sizes_are_refused_with_the_name_of_autotp() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.tensor_parallel.uneven_ranks"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-5000:]
        (refused,) = finished.answers()
        assert refused.startswith(
            "Unsupported: tensor_parallel.autotp_size, or the model-parallel size of the mpu: must"
        )
        assert "elements of" in refused
        assert "on rank 0 and" in refused
        assert "Choose a size that divides the attention heads" in refused


@pytest.mark.promise("P6")
@pytest.mark.thorough
def test_deepspeed_refuses_experts_beside_tensor_parallelism_with_offloading() -> None:
    """Detect a release that supports it: the plugin has not been tested with it."""
    for finished in run_ranks(2, ["-m", "tests.zero.tensor_parallel.refused_experts_ranks"], timeout_s=300):
        assert finished.returncode == 0, finished.output[-5000:]
        (refused,) = finished.answers()
        assert "offload with AutoEP+AutoTP folding is not validated yet" in refused["AutoTP"]
        assert "AutoEP does not currently support tensor model parallelism from mpu" in refused["mpu"]


@pytest.mark.promise("P6")
@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["AutoTP", "mpu"])
def test_a_failed_update_on_one_rank_stops_all_ranks_that_share_models(layout: str) -> None:
    for finished in run_ranks(4, ["-m", "tests.zero.tensor_parallel.failing_model_ranks", layout], timeout_s=600):
        assert finished.returncode == 0, finished.output[-5000:]
        assert "all ranks stopped and recovered" in finished.output


def test_training_stops_in_the_norm_if_the_overflow_is_not_reduced_over_the_ranks_that_share_a_model() -> None:
    """Show that the cases in fp16 detect this fault.

    One rank waits in the reduction of the norm for the rank that has skipped the step. Either it is stuck, or Gloo ends
    it because the other rank calls another collective. The program ends ranks that are stuck.
    """
    ranks = run_ranks(2, ["-m", "tests.zero.tensor_parallel.unreduced_overflow_ranks"], timeout_s=200)
    for finished in ranks:
        first, *others = finished.answers()
        assert first == {"without the fault": []}
        assert not any("with the fault" in found for found in others), "the rank has trained to the end"
        assert finished.returncode != 0
    assert any("_get_norm_groups" in finished.output for finished in ranks), ranks[0].output[-3000:]
