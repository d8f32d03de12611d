"""Check that training beside tensor parallelism on the device has the bits of stock on the CPU accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.software_gpu.training.tensor_parallel_on_device_ranks import CHOICE, EVERY_CASE, STOCK, selected
from tests.zero.tensor_parallel.cases import TensorParallelCase
from tests.zero.training_once import TrainingOnce, on_one_worker, selecting

PROGRAM = "tests.software_gpu.training.tensor_parallel_on_device_ranks"
CLASSES = {STOCK: "DeepSpeedZeroOptimizer_Stage3"}
OURS = "DeepOptimizerStates_Stage3"
SELECTIONS = {name: selecting(PROGRAM, name, timeout_s=900) for name in (CHOICE, *EVERY_CASE)}


def parameters() -> list[Any]:
    """Return a test parameter per case and selection; one worker of pytest-xdist trains a selection."""
    return [
        pytest.param(
            selection,
            case,
            arms,
            id=f"{selection}: {case.name}",
            marks=[
                on_one_worker(f"{PROGRAM} {selection}"),
                *([] if selection == CHOICE else [pytest.mark.thorough]),
            ],
        )
        for selection in SELECTIONS
        for case, _, arms in selected(selection)
    ]


@pytest.mark.promise("P1", "P2")
@pytest.mark.parametrize(("selection", "case", "arms"), parameters())
def test_training_beside_tensor_parallelism_on_the_device_has_the_bits_of_stock(
    selection: str, case: TensorParallelCase, arms: tuple[str, ...], trained_by_selection: dict[str, TrainingOnce]
) -> None:
    for rank, by_name in enumerate(trained_by_selection[selection].answers_by_name(2)):
        assert case.name in by_name, "an earlier case failed"
        result = by_name[case.name]
        assert "error" not in result, result["error"]
        assert tuple(result["arms"]) == arms
        for arm, found in result["arms"].items():
            assert found["differences"] == [], f"rank {rank}, {arm}"
            assert found["class"] == CLASSES.get(arm, OURS)
            if arm.startswith("planned"):
                assert found["placements"] != ["cpu"], "the device updates nothing"
            if arm != STOCK:
                assert found["deferred"] >= 2, f"{arm}: too few updates that overlap with forward"
        numbers = result["numbers"]
        assert numbers["skipped"][-1] == (case.dtype == "fp16"), "the overflow on one rank skips one step on all"
        assert len(set(numbers["loss"])) > 2, "training that changes nothing has equal bits, too"


def test_the_choice_has_an_overflow_on_one_rank_of_a_model() -> None:
    cases = [case for case, *_ in selected(CHOICE)]
    assert {case.dtype for case in cases} == {"bf16", "fp16"}
    assert {case.layout for case in cases} == {"AutoTP", "mpu"}
