"""Choose the Adam kernels: ours, of one pass over memory, or stock's op of three passes, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deep_opt_states.device.kernels.adam import FP32_STATES, AdamKernel, StateDtypes
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic
from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.device.kernels.triton_adam import TritonAdam


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel that updates on the CPU, and why it is the fallback; empty if it is not."""

    kernel: AdamKernel
    why: str = ""


def cpu_adam(
    num_sub_groups: int,
    betas: tuple[float, float],
    *,
    adamw: bool,
    num_threads: int,
    cores: Sequence[int] = (),
    dtypes: StateDtypes = FP32_STATES,
) -> ChosenKernel:
    """Return a kernel that is bit-identical to ``DeepSpeedCPUAdam`` with these ``betas`` and in this mode.

    Thread i of ``num_threads`` runs on ``cores[i]``, if any. Raise DeepSpeed's error if it cannot build its op.
    """
    try:
        arithmetic = known_arithmetic(dtypes)
        return ChosenKernel(FusedAdam(arithmetic, betas, adamw=adamw, num_threads=num_threads, cores=cores))
    except KernelUnavailable as unavailable:
        fallback = "Updates on the CPU fall back to DeepSpeedCPUAdam: the same bits, but three slower passes."
        return ChosenKernel(StockAdam(num_sub_groups, betas, adamw=adamw), f"{unavailable}\n{fallback}")


def gpu_adam(betas: tuple[float, float], *, adamw: bool, dtypes: StateDtypes = FP32_STATES) -> TritonAdam:
    """Return a bit-identical kernel for the current CUDA device. Raise ``KernelUnavailable`` if there is none."""
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return TritonAdam(known_arithmetic(dtypes), betas, adamw=adamw, device=device)


def known_arithmetic(dtypes: StateDtypes = FP32_STATES) -> Arithmetic:
    """Return the arithmetic of stock's op on this machine. Raise ``KernelUnavailable`` if it is not known."""
    arithmetic = find_arithmetic(dtypes)
    if arithmetic is None:
        raise KernelUnavailable(
            "Our kernels must give the bits of DeepSpeedCPUAdam, which computes on this machine in a way that they "
            'cannot reproduce. Only "placement": "cpu" can be used, which updates with DeepSpeedCPUAdam itself.'
        )
    return arithmetic
