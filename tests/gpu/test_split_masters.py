"""Test the GPU kernels of split masters: the update has the CPU kernel's bits on whole ones, and writes are noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deep_opt_states.device.kernels.checksum import BLOCK_NUMEL, num_sums
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_checksum import TritonChecksum
from tests.gpu.kernels import device, on_cpu, on_gpu, triton_adam
from tests.kernels.adam_steps import BETAS, GRADS, differences, machine_arithmetic, random_tensors, steps_of
from tests.kernels.masters import masters_of_every_kind
from tests.kernels.plain_checksum import sums_of
from tests.kernels.split_copy import SplitCopy, joined

NUMEL = 10_007
LENGTHS = (1, 63, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 3 * BLOCK_NUMEL + 77)


@pytest.mark.parametrize("grad_dtype", GRADS)
def test_updates_of_split_masters_have_the_bits_of_whole_ones_on_the_cpu(grad_dtype: torch.dtype) -> None:
    arithmetic, gpu = machine_arithmetic(), triton_adam()
    cpu = FusedAdam(arithmetic, BETAS, adamw=True, num_threads=4)
    for seed, master in enumerate(masters_of_every_kind(NUMEL, np.random.default_rng(0))):
        whole, gradient = random_tensors(NUMEL, grad_dtype, torch.bfloat16, seed)
        # Second moments are never negative: their sign is the missing bit of a split master.
        whole = replace(whole, master=master, exp_avg_sq=whole.exp_avg_sq.abs(), param=master.bfloat16())
        halves = on_gpu(SplitCopy.create(whole).tensors)
        for kernel in (gpu, cpu):
            kernel.restart()
        for step in steps_of(20):
            grad = gradient()
            whole.grad.copy_(grad)
            halves.grad.copy_(grad)
            for kernel, tensors in ((gpu, halves), (cpu, whole)):
                kernel.begin_step([step])
                kernel.update(0, tensors)
            assert differences(joined(on_cpu(halves)), whole) == [], f"masters {seed}, step {step.step}"


@pytest.mark.parametrize("numel", LENGTHS)
def test_the_sums_are_those_of_the_cpu_and_notice_a_changed_bit(numel: int) -> None:
    kernel = TritonChecksum(device())
    param = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()
    on_device = param.to(device())
    sums = torch.full((num_sums(numel),), -7, device=device())
    kernel.record(on_device, sums)
    assert torch.equal(sums.cpu(), sums_of(param))
    differs = torch.zeros(1, dtype=torch.int64, device=device())
    kernel.compare(on_device, sums, differs)
    assert int(differs) == 0
    for place in {0, numel // 2, numel - 1}:
        written = on_device.clone()
        written.view(torch.int16)[place] ^= 1
        differs.zero_()
        kernel.compare(written, sums, differs)
        assert int(differs) == 1 + place // BLOCK_NUMEL, place
