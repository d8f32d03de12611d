"""Check that training beside tensor parallelism on the device has the bits of stock on the CPU accelerator."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from deepspeed.accelerator import get_accelerator

from deep_opt_states.zero.start import planning
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS
from tests.model.profiles import profile
from tests.ranks import ranks
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.software_gpu.training.test_parity_on_device import MACHINE
from tests.zero.parity.training import assert_same_bits
from tests.zero.tensor_parallel.cases import BY_NAME, CASES, block_of, run
from tests.zero.tensor_parallel.layouts import layouts

STEPS = FIRST_STEPS + 3
"""After the first steps, the plugin plans with the windows and the memory that it measured."""


@pytest.mark.P1
@pytest.mark.P2
@ranks(2, group=software_process_group)
def test_training_beside_tensor_parallelism_on_the_device_has_the_bits_of_stock() -> None:
    # DeepSpeed requires instructions that this CPU may lack, although PyTorch computes in fp16 on every CPU.
    get_accelerator().is_fp16_supported = lambda: True
    layout = layouts()["mpu"]
    (case,) = (case for case in CASES if (case.layout, case.dtype, case.setting) == ("mpu", "fp16", "plain"))
    stock = run(case, layout, None, STEPS)
    with (
        plugged(replace(ADVERSARIES["lazy"], rates=MACHINE)),
        mock.patch.object(planning, "quick_profile", return_value=profile()),
    ):
        ours = run(case, layout, block_of(BY_NAME, layout), STEPS)
    assert_same_bits(stock, ours)
    assert ours.placements == {"cpu", "resident", "streamed"}
    assert ours.deferred >= 2, "too few updates that overlap with forward"
    assert stock.numbers["skipped"][-1]
