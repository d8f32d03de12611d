"""Which CPU kernel updates: ours in one pass, or stock's op in three where ours cannot be had. Same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic
from deep_opt_states.device.kernels.stock import StockAdam


@dataclass(frozen=True)
class Choice:
    """``arithmetic`` is None where the fallback updates; ``why`` says then what keeps the fused kernel away."""

    kernel: AdamKernel
    arithmetic: Arithmetic | None
    why: str = ""


def cpu_adam(
    optimizer: DeepSpeedCPUAdam, num_sub_groups: int, *, num_threads: int, cores: Sequence[int] = ()
) -> Choice:
    """For the hyperparameters and the mode that ``optimizer`` was made with."""
    try:
        arithmetic = find_arithmetic()
        if arithmetic is None:
            raise KernelUnavailable("DeepSpeedCPUAdam computes here in a way that the C++ kernel does not know.")
        kernel = FusedAdam(
            arithmetic,
            optimizer.defaults["betas"],
            adamw=optimizer.adam_w_mode,
            num_threads=num_threads,
            cores=cores,
        )
    except KernelUnavailable as unavailable:
        why = f"{unavailable}\nUpdates on the CPU fall back to DeepSpeedCPUAdam, in three passes: same bits, slower."
        return Choice(StockAdam(optimizer, num_sub_groups), None, why)
    return Choice(kernel, arithmetic)
