"""Check collectives on the device with 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest

from tests.software_gpu import collective_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.tiers import thorough
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(collective_checks)
WORLD_SIZES = (
    pytest.param(2, marks=on_one_worker("software_gpu_collectives", 2)),
    thorough(1, on_one_worker("software_gpu_collectives", 1)),
    thorough(4, on_one_worker("software_gpu_collectives", 4)),
)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("check", checks_of(collective_checks))
def test_collectives_on_streams_behave_as_those_of_nccl(check: str, world_size: int, trained: TrainingOnce) -> None:
    assert_passed(trained, check, world_size)
