"""Which kernels update: ours in one pass, or on the CPU stock's op in three where ours cannot be had. Same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic
from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.device.kernels.triton_adam import TritonAdam


@dataclass(frozen=True)
class Choice:
    """``arithmetic`` is None where the fallback updates, which cannot update a part of a sub-group; ``why`` says then
    what keeps the fused kernel away."""

    kernel: AdamKernel
    arithmetic: Arithmetic | None
    why: str = ""


def cpu_adam(
    num_sub_groups: int, betas: tuple[float, float], *, adamw: bool, num_threads: int, cores: Sequence[int] = ()
) -> Choice:
    """What ``DeepSpeedCPUAdam`` with these ``betas`` and in this mode would compute."""
    try:
        arithmetic = known_arithmetic()
        kernel = FusedAdam(arithmetic, betas, adamw=adamw, num_threads=num_threads, cores=cores)
    except KernelUnavailable as unavailable:
        why = f"{unavailable}\nUpdates on the CPU fall back to DeepSpeedCPUAdam, in three passes: same bits, slower."
        return Choice(StockAdam(num_sub_groups, betas, adamw=adamw), None, why)
    return Choice(kernel, arithmetic)


def gpu_adam(betas: tuple[float, float], *, adamw: bool) -> TritonAdam:
    """The same on the current CUDA device. Raises ``KernelUnavailable`` where no kernel would give the CPU's bits."""
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return TritonAdam(known_arithmetic(), betas, adamw=adamw, device=device)


def known_arithmetic() -> Arithmetic:
    """That of stock's op on this machine. Raises ``KernelUnavailable``."""
    arithmetic = find_arithmetic()
    if arithmetic is None:
        raise KernelUnavailable("DeepSpeedCPUAdam computes here in a way that our kernels do not know.")
    return arithmetic
