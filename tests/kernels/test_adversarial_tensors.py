"""Check that the difficult tensors reach every kind of result that is difficult to round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from tests.kernels.adam_steps import BETAS, STEP
from tests.kernels.adversarial_tensors import Offsets, adversarial_grad, adversarial_tensors

NUMEL = 4 * 1024 + 77


def test_results_include_ties_subnormals_infinities_and_nans() -> None:
    ours, still = adversarial_tensors(NUMEL, torch.float32, torch.float16, Offsets(), seed=1)
    cpu = FusedAdam(Arithmetic(16, Tail.UNFUSED), BETAS, adamw=True, num_threads=1)
    ours.grad.copy_(adversarial_grad(NUMEL, torch.float32, np.random.default_rng(2), still))
    cpu.begin_step([replace(STEP, weight_decay=0.0)])
    cpu.update(0, ours)
    bits = ours.master.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    for even_or_odd in (0, 1):
        assert ((bits & 0x1FFFF) == 0x8000 | even_or_odd << 16).sum() > 5, "ties of bf16"
        normal = (magnitude > 0x38800000) & (magnitude < 0x477FE000)
        assert (normal & ((bits & 0x3FFF) == 0x1000 | even_or_odd << 13)).sum() > 5, "ties of fp16"
    for name in ("master", "exp_avg", "exp_avg_sq"):
        result = getattr(ours, name)
        assert result.isnan().sum() > 5
        assert result.isinf().sum() > 5
        assert ((result != 0) & (result.abs() < 2.0**-126)).sum() > 5, "subnormal"
        assert (result == 0).sum() > 5
        assert result.isfinite().float().mean() > 0.8
    assert ours.param is not None
    assert (ours.param.isinf() & ours.master.isfinite()).sum() > 5, "overflow of fp16"
    assert ((ours.param != 0) & (ours.param.abs() < 2.0**-14)).sum() > 5, "subnormal of fp16"
    zeros = ours.master[ours.master == 0]
    assert 0 < zeros.signbit().sum() < len(zeros), "zeros of both signs"
