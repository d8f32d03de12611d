"""Check copies between host and device."""

from __future__ import annotations

import pytest

from tests.software_gpu import copy_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(copy_checks)
pytestmark = on_one_worker("software_gpu_copies", 1)


@pytest.mark.parametrize("check", checks_of(copy_checks))
def test_copies_of_the_software_gpu_behave_as_those_of_cuda(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)
