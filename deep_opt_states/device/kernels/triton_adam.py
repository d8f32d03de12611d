"""Update with Adam in one pass over GPU memory, bit-identical to ``FusedAdam``, by ``triton_kernel.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from itertools import product
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deep_opt_states.device.kernels.adam import (
    FP32_STATES,
    STATES,
    AdamTensors,
    ElementRange,
    RangeUpdate,
    StateDtypes,
)
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.library import DTYPES, KernelUnavailable
from deep_opt_states.device.kernels.scalars import Decay, OnePassAdam, Scalars

_Operands: TypeAlias = tuple[tuple[int], tuple[Any, ...]]
"""The arguments of a launch that are the same in each step: its grid, and the positional ones."""

ALIGNMENT_BYTES = 16
"""Triton compiles one kernel for pointers that are multiples of this, and another one for others."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The ``elements`` per Triton program, and its ``warps``."""

    # With more than four elements per thread, registers would pass through shared memory.
    elements: int = 1024
    warps: int = 8


class TritonAdam(OnePassAdam[dict[str, Any]]):
    """The Triton kernel, launched on the current CUDA stream. An update neither allocates nor synchronises.

    The states of a sub-group must start at multiples of 16 bytes. A step compiles only for dtypes that ``compile`` was
    not called with. Raise ``KernelUnavailable`` if Triton cannot be imported.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        betas: tuple[float, float],
        *,
        adamw: bool,
        device: torch.device,
        block: BlockShape | None = None,
    ) -> None:
        super().__init__(arithmetic, betas, adamw=adamw)
        self._kernel, self._options = _import_kernel()
        self._device = device
        self._block = block or BlockShape()
        self._operands: WeakKeyDictionary[RangeUpdate, _Operands] = WeakKeyDictionary()
        """Operands of earlier steps: checks and views would take longer than the launch."""

    def compile(
        self,
        grad_dtypes: Iterable[torch.dtype],
        param_dtypes: Iterable[torch.dtype | None],
        states: StateDtypes = FP32_STATES,
    ) -> None:
        """Compile in seconds, or load from a cache, for all dtypes and alignments. Raise ``KernelUnavailable``."""
        numbers = {field.name: np.float32(0) for field in fields(Scalars) if field.name != "decay_kind"}
        zeros = Scalars(**numbers, decay_kind=Decay.NONE)
        try:
            for grad_dtype, param_dtype, *offsets in product(grad_dtypes, param_dtypes, (0, 1), (0, 1)):
                example = self._example(states, grad_dtype, param_dtype, *offsets)
                self._launch(self._arguments_of(zeros), self._operands_of(example, numel=0, cut=0))
        except Exception as error:
            raise KernelUnavailable(
                f"Triton cannot compile the GPU Adam kernel ({type(error).__name__}: {error}); it needs a CUDA GPU "
                f"of compute capability 8.0 or later and a C compiler (apt-get install gcc)."
            ) from error

    def update_ranges(self, updates: Sequence[RangeUpdate]) -> None:
        """Update each range by a launch of its own."""
        for update in updates:
            operands = self._operands.get(update)
            if operands is None:
                operands = self._operands[update] = self._derive(update.tensors, update.element_range)
            self._launch(self._arguments[update.sub_group], operands)

    def _derive(self, tensors: AdamTensors, element_range: ElementRange) -> _Operands:
        # Start at the last element before the range at which the states are aligned. For other pointers, Triton would
        # compile another kernel, without wide loads.
        skip = element_range.begin % (ALIGNMENT_BYTES // tensors.master.itemsize)
        _check(tensors, self._device, element_range.numel, skip)
        numel = skip + element_range.numel
        widened = tensors.map(lambda tensor: tensor.as_strided((numel,), (1,), tensor.storage_offset() - skip))
        cut = self._arithmetic.cut(element_range.sub_group_numel) - element_range.begin + skip
        return self._operands_of(widened, numel=numel, cut=min(cut, numel), skip=skip)

    def _operands_of(self, tensors: AdamTensors, *, numel: int, cut: int, skip: int = 0) -> _Operands:
        programs = max(1, -(-numel // self._block.elements))
        pointers = (tensors.master, tensors.exp_avg, tensors.exp_avg_sq, tensors.grad, tensors.param)
        return (programs,), (*pointers, numel, cut, skip)

    def _arguments_of(self, scalars: Scalars) -> dict[str, Any]:
        # Triton passes a float as fp32, without loss here.
        numbers = {name: float(value) for name, value in vars(scalars).items() if name != "decay_kind"}
        return {
            **numbers,
            "decay_kind": int(scalars.decay_kind),
            "TAIL": int(self._arithmetic.tail),
            "BLOCK": self._block.elements,
            "num_warps": self._block.warps,
            **self._options,
        }

    def _launch(self, keywords: dict[str, Any], operands: _Operands) -> None:
        grid, positional = operands
        self._kernel[grid](*positional, **keywords)

    def _example(
        self,
        states: StateDtypes,
        grad_dtype: torch.dtype,
        param_dtype: torch.dtype | None,
        grad_offset: int,
        param_offset: int,
    ) -> AdamTensors:
        """Return tensors of one element, the gradient and the parameter at the given offsets in elements."""

        def one(dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
            return torch.zeros(offset + 1, dtype=dtype, device=self._device)[offset:]

        param = None if param_dtype is None else one(param_dtype, param_offset)
        return AdamTensors(
            master=one(states.master),
            exp_avg=one(states.moment),
            exp_avg_sq=one(states.moment),
            grad=one(grad_dtype, grad_offset),
            param=param,
        )


def _import_kernel() -> tuple[Any, dict[str, bool]]:
    """Return the kernel and its launch options. Raise ``KernelUnavailable`` if Triton cannot be imported."""
    try:
        from deep_opt_states.device.kernels import triton_kernel
    except Exception as error:
        raise KernelUnavailable(
            f"The GPU Adam kernel needs Triton, which cannot be imported ({type(error).__name__}: {error}): "
            f"pip install {_requirement()}"
        ) from error
    return triton_kernel.update, triton_kernel.OPTIONS


def _requirement() -> str:
    """Return the requirement of PyTorch, such as ``triton==3.6.0``, or ``triton`` if its build has none."""
    requirements = [line.split(";")[0].strip() for line in metadata.requires("torch") or ()]
    return next((line for line in requirements if line.startswith("triton=")), "triton")


def _check(tensors: AdamTensors, device: torch.device, numel: int, skip: int) -> None:
    """Raise ``AssertionError`` for tensors that the kernel would access wrongly, or that it is not compiled for."""
    StateDtypes.found_in(tensors)
    for name, tensor in vars(tensors).items():
        if tensor is None:
            continue
        assert tensor.device == device, (name, tensor.device)
        assert tensor.is_contiguous(), (name, tensor.stride())
        assert tensor.numel() == numel, (name, tensor.shape)
        assert tensor.storage_offset() >= skip, (name, "has no elements before it")
        assert tensor.dtype in DTYPES, (name, tensor.dtype)
        if name in STATES:
            assert (tensor.data_ptr() - skip * tensor.element_size()) % ALIGNMENT_BYTES == 0, name
