"""Check that the GPU Adam of the device has the CPU kernel's bits, and the checks of the Triton kernel's arguments."""

from __future__ import annotations

import pytest

from tests.software_gpu import adam_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(adam_checks)
pytestmark = on_one_worker("software_gpu_adam", 1)


@pytest.mark.parametrize("check", checks_of(adam_checks))
def test_launches_of_the_triton_kernel_have_the_bits_of_the_fused_kernel(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)
