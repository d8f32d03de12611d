"""Check that training on the device, with stock and with the plugin, has the bits of stock on the CPU accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from deep_opt_states.zero.step.measured_windows import FIRST_UPDATES
from tests.software_gpu.settings import ADVERSARIES
from tests.software_gpu.training.parity_on_device_ranks import CHOICE, EVERY_CASE, selected
from tests.zero.parity.cases import QUICK
from tests.zero.training_once import TrainingOnce, on_one_worker, selecting

PROGRAM = "tests.software_gpu.training.parity_on_device_ranks"
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
WORLD_SIZES = {CHOICE: (1, 2), **dict.fromkeys(ADVERSARIES, (1, 2)), **dict.fromkeys(EVERY_CASE, (1, 2, 4))}
"""The numbers of ranks by selection of cases."""

SELECTIONS = {name: selecting(PROGRAM, name, timeout_s=900) for name in WORLD_SIZES}


def params_of(selection: str, world_size: int) -> list[Any]:
    """Return a test parameter per case; one worker of pytest-xdist trains all cases of a selection and world size."""
    marks = [on_one_worker(f"{PROGRAM} {selection}", world_size)]
    if selection != CHOICE:
        marks.append(pytest.mark.thorough)
    return [
        pytest.param(selection, case, [str(arm) for arm in arms], id=f"{selection}: {case.name}", marks=marks)
        for case, arms in selected(selection, world_size)
    ]


PARAMS = [
    param
    for selection, world_sizes in WORLD_SIZES.items()
    for world_size in world_sizes
    for param in params_of(selection, world_size)
]


@pytest.mark.promise("P1", "P2", "P4")
@pytest.mark.parametrize(("selection", "case", "arms"), PARAMS)
def test_training_on_the_device_has_the_bits_of_stock_on_the_cpu_accelerator(
    selection: str, case: Any, arms: list[str], trained_by_selection: dict[str, TrainingOnce]
) -> None:
    for rank, by_name in enumerate(trained_by_selection[selection].answers_by_name(case.world_size)):
        assert case.name in by_name, "an earlier case failed"
        result = by_name[case.name]
        assert "error" not in result, result["error"]
        assert list(result["arms"]) == arms
        for arm, found in result["arms"].items():
            assert found["differences"] == [], f"rank {rank}, {arm}"
            assert found["class"] == (STOCK if arm.endswith("stock") else OURS)
            if not arm.endswith("stock") and "'overlap_forward': False" not in arm:
                # Where the plugin plans, the first updates end inside step(), so that windows can be measured.
                inside = FIRST_UPDATES if found["plans"] else 0
                updates = case.steps - len(case.poisoned) - inside
                assert found["deferred"] >= updates // 2, f"{arm}: too few deferred updates"
        # Training that changed nothing would have equal bits, too.
        assert len(set(result["numbers"]["loss"])) > 2


def test_the_choice_has_every_case_of_make_test_and_every_kind_of_arm() -> None:
    for world_size in WORLD_SIZES[CHOICE]:
        chosen = {case.name: arms for case, arms in selected(CHOICE, world_size)}
        assert chosen.keys() == {case.name for case in QUICK if case.world_size == world_size}
        arms = [arm for arms_of_case in chosen.values() for arm in arms_of_case]
        for adversary in EVERY_CASE:
            blocks = [arm.resumed_by for arm in arms if arm.adversary == adversary]
            assert None in blocks
            assert any(blocks)
