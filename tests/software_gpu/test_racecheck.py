"""Check the race check of the device on programs whose order is known."""

from __future__ import annotations

import pytest

from tests.software_gpu import racecheck_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(racecheck_checks)
pytestmark = on_one_worker("software_gpu_racecheck", 1)


@pytest.mark.parametrize("check", checks_of(racecheck_checks))
def test_the_race_check_reports_unordered_accesses_and_no_others(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)
