"""Check that units which move between steps on the device leave the bits of stock on the CPU accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.software_gpu.training.moves_on_device_ranks import BOTH, CHOICE, arms_of, selected
from tests.zero.moves.move_counts import KINDS, MoveCounts, assert_many_moves, total
from tests.zero.training_once import TrainingOnce, on_one_worker, selecting

PROGRAM = "tests.software_gpu.training.moves_on_device_ranks"
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
WORLD_SIZES = {CHOICE: (1, 2), **dict.fromkeys((*BOTH, "jitter"), (1, 2, 3))}
"""The numbers of ranks by selection of cases."""

SELECTIONS = {name: selecting(PROGRAM, name, timeout_s=900) for name in WORLD_SIZES}


def marked(selection: str, *values: Any, name: str) -> Any:
    """Return a test parameter; one worker of pytest-xdist trains all cases of a selection."""
    marks = [on_one_worker(f"{PROGRAM} {selection}")]
    if selection != CHOICE:
        marks.append(pytest.mark.thorough)
    return pytest.param(selection, *values, id=name, marks=marks)


@pytest.mark.promise("P1", "P2", "P4")
@pytest.mark.parametrize(
    ("selection", "case", "adversaries"),
    [
        marked(selection, case, adversaries, name=f"{selection}: {case.name}")
        for selection, world_sizes in WORLD_SIZES.items()
        for world_size in world_sizes
        for case, adversaries in selected(selection, world_size)
    ],
)
def test_units_that_move_on_the_device_leave_the_bits_of_stock(
    selection: str, case: Any, adversaries: tuple[str, ...], trained_by_selection: dict[str, TrainingOnce]
) -> None:
    for rank, by_name in enumerate(trained_by_selection[selection].answers_by_name(case.world_size)):
        assert case.name in by_name, "an earlier case failed"
        result = by_name[case.name]
        assert "error" not in result, result["error"]
        assert list(result["arms"]) == [f"{adversary}{name}" for adversary in adversaries for name in arms_of(case)]
        for arm, found in result["arms"].items():
            assert found["class"] == (STOCK if arm.endswith("for stock") else OURS)
            assert found["differences"] == [], f"rank {rank}, {arm}"
            assert found["moved"]["kinds"]
            assert found["moved"]["kinds"].keys() <= KINDS
        # Training that changed nothing would have equal bits, too.
        assert len(set(result["losses"])) > 2


def moves_of(selection: str, world_size: int, trained_by_selection: dict[str, TrainingOnce]) -> list[MoveCounts]:
    """Return the moves in all cases of a selection and a number of ranks, of each rank."""
    return [
        total(found["moved"] for result in answers for found in result["arms"].values())
        for answers in trained_by_selection[selection].answers(world_size)
    ]


@pytest.mark.parametrize(
    ("selection", "world_size"),
    [
        marked(selection, world_size, name=f"{selection}, {world_size} ranks")
        for selection in WORLD_SIZES
        if selection != CHOICE
        for world_size in WORLD_SIZES[selection]
    ],
)
def test_a_thousand_units_move_on_the_device_at_each_number_of_ranks(
    selection: str, world_size: int, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    for counts in moves_of(selection, world_size, trained_by_selection):
        assert_many_moves(counts)


@pytest.mark.parametrize("selection", [marked(CHOICE, name=CHOICE)])
def test_units_move_often_on_the_device(selection: str, trained_by_selection: dict[str, TrainingOnce]) -> None:
    for world_size in WORLD_SIZES[selection]:
        for counts in moves_of(selection, world_size, trained_by_selection):
            assert_many_moves(counts, least={1: 300, 2: 100}[world_size], recut_plans=5)


@pytest.mark.parametrize("selection", [marked(selection, name=selection) for selection in BOTH])
def test_moving_states_are_evicted_with_offloaded_parameters(
    selection: str, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    (by_name,) = trained_by_selection[selection].answers_by_name(1)
    counts = total(
        found["moved"]
        for case, _ in selected(selection, 1)
        if case.offload_param
        for found in by_name[case.name]["arms"].values()
    )
    assert min(counts.promotions, counts.demotions) >= 100, counts
    assert min(counts.recut_plans, counts.evictions, counts.restorations) >= 5, counts
