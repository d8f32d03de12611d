"""Measure matrix products of two sizes on the accelerator, the main operation of forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.profiler.device_timer import DeviceTimer
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import synchronize


class MatrixProducts:
    """A probe that multiplies two bf16 matrices of shape [size, size], and two of shape [small_size, small_size].

    ``small_size`` is at most ``size``. If both are equal, one product gives both rates. The matrices are random,
    because a GPU needs less power for constants and runs faster.
    """

    def __init__(self, device: Device[Any], size: int, small_size: int) -> None:
        # Use the caller's stream: cuBLAS keeps a workspace for every stream that it has been used on.
        self._timer = DeviceTimer(device, device.current_stream())
        self._size, self._small_size = size, small_size
        # Use an own generator: the random numbers of training must not depend on whether a profile was measured.
        generator = torch.Generator().manual_seed(0)
        left, right = (device.empty(size * size, torch.bfloat16) for _ in range(2))
        for matrix in (left, right):
            device.copy(matrix, torch.rand(size * size, generator=generator, dtype=torch.float32, device="cpu"))
        # The small matrices consist of the first elements of the large ones.
        self._matrices = {
            rows: tuple(
                elements[: rows * rows].view(rows, rows)
                for elements in (left, right, device.empty(rows * rows, torch.bfloat16))
            )
            for rows in (size, small_size)
        }
        synchronize(device)

    def repeat(self) -> Rates:
        """Multiply once per size, and return the floating-point operations per second of the accelerator's time."""
        flops_per_s = {rows: 2 * rows**3 / self._seconds_of_product(rows) for rows in self._matrices}
        return {
            "matmul_flops_per_s": flops_per_s[self._size],
            "matmul_small_flops_per_s": flops_per_s[self._small_size],
        }

    def verify(self) -> None:
        """Raise ``ProbeError`` if the first row of a product is wrong."""
        for left, right, product in self._matrices.values():
            if not torch.allclose(product[0].float(), left[0].float() @ right.float(), rtol=0.02):
                raise ProbeError("the matrix product on the accelerator is wrong")

    def _seconds_of_product(self, rows: int) -> float:
        left, right, product = self._matrices[rows]
        return self._timer.seconds_of(lambda: torch.mm(left, right, out=product))
