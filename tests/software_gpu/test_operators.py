"""Check that operators on the device have the CPU's bits, and CUDA's rules for devices and waits."""

from __future__ import annotations

import pytest

from tests.software_gpu import operator_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(operator_checks)
pytestmark = on_one_worker("software_gpu_operators", 1)


@pytest.mark.parametrize("check", checks_of(operator_checks))
def test_operators_have_the_bits_of_the_cpu_and_the_rules_of_cuda(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)
