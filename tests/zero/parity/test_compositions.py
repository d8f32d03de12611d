"""Check that libraries combined with ZeRO-3 give the bits of stock; ``test_refusals.py`` has those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zero.training_once import TrainingOnce, on_one_worker, selecting

PROGRAM = "tests.zero.parity.composition_ranks"

MODELS = {
    "quick": ("transformers", "peft", "traced by torch.compile"),
    "ulysses": ("ulysses",),
    "thorough": ("torch.compile",),
}
"""The models that the same ranks train."""

SELECTIONS = {name: selecting(PROGRAM, *models, timeout_s=300) for name, models in MODELS.items()}

WORLD_SIZES = {"quick": 1, "ulysses": 2, "thorough": 1}


def grouped(selection: str, name: str) -> Any:
    """Return a test parameter such that one worker of pytest-xdist runs all models of a selection."""
    marks = [on_one_worker(f"{PROGRAM} {selection}", WORLD_SIZES[selection])]
    if selection == "thorough":
        marks.append(pytest.mark.thorough)
    return pytest.param(selection, name, id=name, marks=marks)


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("selection", "name"), [grouped(selection, name) for selection, names in MODELS.items() for name in names]
)
def test_transformers_peft_compiled_and_ulysses_models_train_to_the_bits_of_stock(
    selection: str, name: str, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    by_rank = trained_by_selection[selection].answers_by_name(WORLD_SIZES[selection])
    for by_name in by_rank:
        answer = by_name[name]
        assert answer["classes"] == ["DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"]
        assert answer["sub_groups"] >= 3
        assert any(norm > 0.1 for norm in answer["norms"]), "clipping was never active"
        assert answer["differences"] == []
