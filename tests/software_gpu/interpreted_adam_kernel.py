"""Execute launches of the Triton kernel by interpreting the PTX that Triton compiles, on a stream of the device.

This is the arithmetic of the very instructions that a GPU would execute. The interpreter is slow, so only small models
train with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.kernels.ptx_launch import PtxKernel
from tests.software_gpu import device

CAPABILITY = 90
"""The compute capability of H100 and H200."""

NUMEL_ARGUMENT = 5
"""The position of the number of elements among the arguments of ``triton_kernel.update``."""


class InterpretedAdamKernel:
    """The kernel that replaces the jitted function of Triton in ``TritonAdam``.

    ``launches`` is the number of launches so far that had elements; the others only compile.
    """

    def __init__(self) -> None:
        self._ptx = PtxKernel(CAPABILITY)
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *arguments: Any, **named: Any) -> None:
        views = [_view(argument) for argument in arguments]
        numel = arguments[NUMEL_ARGUMENT]

        def interpret() -> None:
            self._ptx[grid](*(view() for view in views), **named)
            self.launches += numel > 0

        device.launch(interpret, "GPU Adam, interpreted")


def _view(argument: Any) -> Any:
    """Return a function that opens ``argument`` if it is a tensor, and otherwise returns it.

    The function holds no reference to the tensor, because the arguments of a kernel do not.
    """
    if not isinstance(argument, torch.Tensor):
        return lambda: argument
    return partial(device.host_view, argument.data_ptr(), tuple(argument.shape), argument.dtype)
