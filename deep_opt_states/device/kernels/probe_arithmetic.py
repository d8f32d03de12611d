"""Find the ``Arithmetic`` of the op that stock DeepSpeed built on this machine."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, StateDtypes
from deep_opt_states.device.kernels.arithmetic import CANDIDATES, Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.stock import StockAdam

TRIALS = 12
STEPS = 3
# The tail of 15 elements is the longest for every width but 1.
NUMEL = 8 * 16 + 15
BETAS = 2 / 3, 0.999
GRAD_SCALE = 0.5
# The training script may have changed the default dtype and device.
FP32: Any = {"dtype": torch.float32, "device": "cpu"}


@cache
def find_arithmetic(dtypes: StateDtypes) -> Arithmetic | None:
    """Return the first candidate that is bit-identical to stock in both modes of Adam. Raise ``KernelUnavailable``."""
    # A load may put the moments in the dtype of the masters, so that these are also tried.
    tried = list(product((True, False), dict.fromkeys((dtypes, StateDtypes(dtypes.master, dtypes.master)))))
    expected = [_train(StockAdam(TRIALS, BETAS, adamw=adamw), each) for adamw, each in tried]
    for candidate in CANDIDATES:
        kernels = (FusedAdam(candidate, BETAS, adamw=adamw, num_threads=1) for adamw, _ in tried)
        found = [_train(kernel, each) for kernel, (_, each) in zip(kernels, tried, strict=True)]
        if all(map(torch.equal, found, expected)):
            return candidate
    return None


def _train(kernel: AdamKernel, dtypes: StateDtypes) -> torch.Tensor:
    """Return p, m and v after some steps from the same random start, of shape [TRIALS, 3, NUMEL]."""
    generator = torch.Generator().manual_seed(0)
    states = torch.rand(TRIALS, 3, NUMEL, generator=generator, **FP32)
    masters, moments = states[:, 0].to(dtypes.master), states[:, 1:].to(dtypes.moment)
    for step in range(1, STEPS + 1):
        kernel.begin_step([_step(step)] * TRIALS)
        for trial, (master, (exp_avg, exp_avg_sq)) in enumerate(zip(masters, moments, strict=True)):
            grad = torch.randn(NUMEL, generator=generator, **FP32).to(dtypes.master)
            if trial % 2:
                # The products of the first moment cancel but for their rounding. Otherwise, bf16 would round away
                # nearly every difference between the candidates.
                exp_avg.copy_(grad).mul_(-GRAD_SCALE * (1 - BETAS[0]) / BETAS[0])
            tensors = AdamTensors(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, param=None)
            kernel.update(trial, tensors)
    kernel.close()
    return torch.cat([masters.float().unsqueeze(1), moments.float()], dim=1)


def _step(step: int) -> AdamStep:
    return AdamStep(
        step=step,
        lr=1e-2 / step,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=1e-8,
        weight_decay=0.1,
        bias_correction=True,
        grad_scale=GRAD_SCALE,
    )
