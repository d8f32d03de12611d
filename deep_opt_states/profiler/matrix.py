"""Measure a matrix product on the accelerator, the main operation of forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.profiler.device_timer import DeviceTimer
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import synchronize


class MatrixProduct:
    """A probe that multiplies two bf16 matrices of shape [size, size].

    The matrices are random, because a GPU needs less power for constants and runs faster.
    """

    def __init__(self, device: Device[Any], size: int) -> None:
        # Use the caller's stream: cuBLAS keeps a workspace for every stream that it has been used on.
        self._timer = DeviceTimer(device, device.current_stream())
        # Use an own generator: the random numbers of training must not depend on whether a profile was measured.
        generator = torch.Generator().manual_seed(0)
        self._left, self._right, self._product = (
            device.empty(size * size, torch.bfloat16).view(size, size) for _ in range(3)
        )
        for matrix in (self._left, self._right):
            device.copy(matrix, torch.rand(size, size, generator=generator, dtype=torch.float32, device="cpu"))
        synchronize(device)

    def repeat(self) -> Rates:
        """Multiply once and return the floating-point operations per second of the accelerator's time."""
        elapsed_s = self._timer.seconds_of(lambda: torch.mm(self._left, self._right, out=self._product))
        return {"matmul_flops_per_s": 2 * self._left.shape[0] ** 3 / elapsed_s}

    def verify(self) -> None:
        """Raise ``ProbeError`` if the first row of the product is wrong."""
        first_row = self._left[0].float() @ self._right.float()
        if not torch.allclose(self._product[0].float(), first_row, rtol=0.02):
            raise ProbeError("the matrix product on the accelerator is wrong")
