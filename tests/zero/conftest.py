"""Provide the fixtures that start the ranks of a module of tests."""

from __future__ import annotations

import pytest

from tests.zero.training_once import ProgramRanks, TrainingOnce


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainingOnce:
    """Return the ranks that the module of the test names in ``RANKS``, started once per world size."""
    return TrainingOnce(request.module.RANKS, lambda: tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def trained_by_selection(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TrainingOnce]:
    """Return the ranks of each selection that the module names in ``SELECTIONS``, started once per world size."""
    selections: dict[str, ProgramRanks] = request.module.SELECTIONS
    return {name: TrainingOnce(ranks, lambda: tmp_path_factory.mktemp("ranks")) for name, ranks in selections.items()}
