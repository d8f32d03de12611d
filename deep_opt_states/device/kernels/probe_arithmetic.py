"""Finds the ``Arithmetic`` of the op that stock DeepSpeed built on this machine."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.device.kernels.arithmetic import CANDIDATES, Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.stock import StockAdam

TRIALS = 12
STEPS = 3
BETAS = (0.9, 0.999)
# Leaves a tail of 15, the longest, with every width but 1: 540 elements of it tell the candidates apart.
NUMEL = 8 * 16 + 15
# Whatever the script that trains has made the default.
FP32: Any = {"dtype": torch.float32, "device": "cpu"}


@cache
def find_arithmetic() -> Arithmetic | None:
    """The first candidate with stock's bits, in both modes of Adam; None if there is none.

    Takes milliseconds once stock's op and our library are loaded. Raises ``KernelUnavailable``, and what DeepSpeed
    raises where it cannot build its op.
    """
    expected = {adamw: _trained(StockAdam(TRIALS, BETAS, adamw=adamw)) for adamw in (True, False)}
    for candidate in CANDIDATES:
        found = {adamw: _trained(FusedAdam(candidate, BETAS, adamw=adamw, num_threads=1)) for adamw in expected}
        if all(torch.equal(found[adamw], expected[adamw]) for adamw in expected):
            return candidate
    return None


def _trained(kernel: AdamKernel) -> torch.Tensor:
    """p, m and v after some steps, from the same random start every time; shape [TRIALS, 3, NUMEL]."""
    generator = torch.Generator().manual_seed(0)
    states = torch.rand(TRIALS, 3, NUMEL, generator=generator, **FP32)
    for step in range(1, STEPS + 1):
        kernel.begin_step([_step(step)] * TRIALS)
        for trial, (master, exp_avg, exp_avg_sq) in enumerate(states):
            grad = torch.randn(NUMEL, generator=generator, **FP32)
            tensors = AdamTensors(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, param=None)
            kernel.update(trial, tensors)
    kernel.close()
    return states


def _step(step: int) -> AdamStep:
    return AdamStep(
        step=step,
        lr=1e-2 / step,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=1e-8,
        weight_decay=0.1,
        bias_correction=True,
        grad_scale=0.7,
    )
