from __future__ import annotations

import pytest

from tests.zero.training_once import TrainingOnce


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainingOnce:
    """Return the ranks that the module of the test names in ``RANKS``, started once per world size."""
    return TrainingOnce(request.module.RANKS, lambda: tmp_path_factory.mktemp("ranks"))
