"""Adam in one pass over the accelerator's memory, with the bits of ``FusedAdam``: ``triton_kernel.py`` launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import metadata
from itertools import product
from typing import Any

import numpy as np
import torch

from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors, OneByOne, Part, zero
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.library import DTYPES, KernelUnavailable
from deep_opt_states.device.kernels.scalars import BetaPowers, Decay, Scalars

STATES = ("master", "exp_avg", "exp_avg_sq")

ALIGNMENT_BYTES = 16
"""Triton compiles a kernel for pointers that are multiples of it, and another for those that are not."""

ALIGNED_ELEMENTS = ALIGNMENT_BYTES // 4
"""So many fp32 elements apart."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """``elements`` to a program of ``warps``. Four to a thread: a load or store of 16 bytes for each fp32 tensor.

    With more, the 16-bit parameters take another layout, and the registers pass through shared memory.
    """

    elements: int = 1024
    warps: int = 8


class TritonAdam(OneByOne):
    """Updates on the CUDA stream that is current where ``update`` is called; neither allocates nor synchronises.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` of a sub-group begin at multiples of 16 bytes. What ``compile`` was
    called for is not compiled in a step. Raises ``KernelUnavailable`` where Triton cannot be imported.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        betas: tuple[float, float],
        *,
        adamw: bool,
        device: torch.device,
        block: Block | None = None,
    ) -> None:
        self._kernel, self._options = _imported()
        self._arithmetic = arithmetic
        self._betas, self._adamw = betas, adamw
        self._device = device
        self._block = block or Block()
        self.restart()

    def compile(self, grad_dtypes: Iterable[torch.dtype], param_dtypes: Iterable[torch.dtype | None]) -> None:
        """For every combination, wherever gradients and parameters begin; and loaded onto the device, by a launch.

        Seconds at the first time on a machine, milliseconds from Triton's cache later. Raises ``KernelUnavailable``.
        """
        numbers = {field.name: np.float32(0) for field in fields(Scalars) if field.name != "decay_kind"}
        nothing = Scalars(**numbers, decay_kind=Decay.NONE)
        try:
            for grad_dtype, param_dtype, *offsets in product(grad_dtypes, param_dtypes, (0, 1), (0, 1)):
                self._launch(nothing, self._example(grad_dtype, param_dtype, *offsets), numel=0, cut=0)
        except Exception as error:
            raise KernelUnavailable(
                f"Triton cannot compile the GPU Adam kernel ({type(error).__name__}: {error}); it takes a CUDA GPU of "
                f"compute capability 8.0 or later and a C compiler (apt-get install gcc)."
            ) from error

    def restart(self) -> None:
        self._powers = BetaPowers(self._betas, adamw=self._adamw)
        self._scalars: list[Scalars] = []

    def zero(self, tensors: AdamTensors) -> None:
        zero(tensors)

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._scalars = self._powers.scalars(steps)

    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        part = part or Part.whole(tensors.master.numel())
        _check(tensors, self._device, part)
        # From the last multiple of 16 bytes on, which is in the same memory: the part's own begin would be compiled for
        # anew, and without wide loads.
        skip = part.begin % ALIGNED_ELEMENTS
        widened = tensors.each(partial(_from_before, skip=skip))
        numel = skip + part.numel
        cut = self._arithmetic.cut(part.of) - part.begin + skip
        self._launch(self._scalars[sub_group], widened, numel=numel, cut=min(cut, numel), skip=skip)

    def close(self) -> None:
        """Nothing to free."""

    def _launch(self, scalars: Scalars, tensors: AdamTensors, *, numel: int, cut: int, skip: int = 0) -> None:
        programs = max(1, -(-numel // self._block.elements))
        # Triton passes a float as fp32, which each of these is, and an integer as it is declared.
        numbers = {name: float(value) for name, value in vars(scalars).items() if name != "decay_kind"}
        self._kernel[(programs,)](
            tensors.master,
            tensors.exp_avg,
            tensors.exp_avg_sq,
            tensors.grad,
            tensors.param,
            numel,
            cut,
            skip,
            **numbers,
            decay_kind=int(scalars.decay_kind),
            TAIL=int(self._arithmetic.tail),
            BLOCK=self._block.elements,
            num_warps=self._block.warps,
            **self._options,
        )

    def _example(
        self, grad_dtype: torch.dtype, param_dtype: torch.dtype | None, grad_offset: int, param_offset: int
    ) -> AdamTensors:
        def one(dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
            return torch.zeros(offset + 1, dtype=dtype, device=self._device)[offset:]

        return AdamTensors(
            master=one(torch.float32),
            exp_avg=one(torch.float32),
            exp_avg_sq=one(torch.float32),
            grad=one(grad_dtype, grad_offset),
            param=None if param_dtype is None else one(param_dtype, param_offset),
        )


def triton_version() -> str:
    """Empty where there is no Triton."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _imported() -> tuple[Any, dict[str, bool]]:
    try:
        from deep_opt_states.device.kernels import triton_kernel
    except Exception as error:
        # An installation that does not fit fails in many ways when it is imported.
        raise KernelUnavailable(
            f"The GPU Adam kernel needs Triton, which cannot be imported ({type(error).__name__}: {error}): "
            f"pip install {_requirement()}"
        ) from error
    return triton_kernel.update, triton_kernel.OPTIONS


def _requirement() -> str:
    """What the torch that is installed pins, such as ``triton==3.6.0``; builds without CUDA pin none."""
    requirements = [line.split(";")[0].strip() for line in metadata.requires("torch") or ()]
    return next((line for line in requirements if line.startswith("triton=")), "triton")


def _from_before(tensor: torch.Tensor, skip: int) -> torch.Tensor:
    """The tensor with the ``skip`` elements that lie before it."""
    return tensor.as_strided((skip + tensor.numel(),), (1,), tensor.storage_offset() - skip)


def _check(tensors: AdamTensors, device: torch.device, part: Part) -> None:
    """Raise ``AssertionError`` for what the kernel would read or write wrongly, or ``compile`` has not compiled for.

    To be called with the part's own tensors: ``_from_before`` gives a contiguous view of whatever it is given.
    """
    skip = part.begin % ALIGNED_ELEMENTS
    for name, tensor in vars(tensors).items():
        if tensor is None:
            continue
        assert tensor.device == device, (name, tensor.device)
        assert tensor.is_contiguous(), (name, tensor.stride())
        assert tensor.numel() == part.numel, (name, tensor.shape)
        assert tensor.storage_offset() >= skip, (name, "has no elements before it")
        if name in STATES:
            assert tensor.dtype == torch.float32, (name, tensor.dtype)
            assert (tensor.data_ptr() - skip * tensor.element_size()) % ALIGNMENT_BYTES == 0, name
        else:
            assert tensor.dtype in DTYPES, (name, tensor.dtype)
