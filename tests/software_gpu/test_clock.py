"""Check the emulated times of copies, kernels and work of the host, which do not depend on this machine's speed."""

from __future__ import annotations

import pytest

from tests.software_gpu import clock_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(clock_checks)
pytestmark = on_one_worker("software_gpu_clock", 1)


@pytest.mark.parametrize("check", checks_of(clock_checks))
def test_emulated_times_follow_from_the_rates(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)
