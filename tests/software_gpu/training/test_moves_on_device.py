"""Check that units which move between steps on the device leave the bits of stock on the CPU accelerator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.software_gpu.training.moves_on_device_ranks import BOTH, CHOICE, selected
from tests.zero.moves.random_plans import KINDS
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

PROGRAM = "tests.software_gpu.training.moves_on_device_ranks"
WORLD_SIZES = {CHOICE: (1, 2), **dict.fromkeys((*BOTH, "jitter"), (1, 2, 3))}
"""The numbers of ranks by selection of cases."""

LEAST_MOVES = {CHOICE: 300, "plain": 1500, "lazy": 1500, "jitter": 1500}
"""The least number of units that move in all cases of a selection together, on one rank of each."""


@pytest.fixture(scope="module")
def moved_by_selection(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingOnce]:
    """Return the ranks of each selection, started once per world size."""

    def training(selection: str) -> TrainingOnce:
        ranks = ProgramRanks(PROGRAM, timeout_s=900, arguments=lambda folder: [selection])
        return TrainingOnce(ranks, lambda: tmp_path_factory.mktemp("ranks"))

    return {selection: training(selection) for selection in WORLD_SIZES}


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
    selection: str, case: Any, adversaries: tuple[str, ...], moved_by_selection: dict[str, TrainingOnce]
) -> None:
    for rank, by_name in enumerate(moved_by_selection[selection].answers_by_name(case.world_size)):
        assert case.name in by_name, "an earlier case failed"
        result = by_name[case.name]
        assert "error" not in result, result["error"]
        assert list(result["arms"]) == list(adversaries)
        for adversary, found in result["arms"].items():
            assert found["class"] == "DeepOptimizerStates_Stage3"
            assert found["differences"] == [], f"rank {rank}, {adversary}"
            assert set(found["moved"]) <= KINDS
        # Training that changed nothing would have equal bits, too.
        assert len(set(result["losses"])) > 2


@pytest.mark.parametrize("selection", [marked(selection, name=selection) for selection in WORLD_SIZES])
def test_units_move_often_on_the_device(selection: str, moved_by_selection: dict[str, TrainingOnce]) -> None:
    moved: Counter[str] = Counter()
    for world_size in WORLD_SIZES[selection]:
        for result in moved_by_selection[selection].answers(world_size)[0]:
            for found in result["arms"].values():
                moved.update(found["moved"])
    assert set(moved) == KINDS
    assert moved.total() >= LEAST_MOVES[selection]
