"""Scale, update with Adam and round in one pass over host memory, bit-identical to stock's three passes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch

from deep_opt_states.device.kernels.adam import (
    FP32_STATES,
    STATES,
    AdamTensors,
    ElementRange,
    RangeUpdate,
    StateDtypes,
    UpdatedStates,
)
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.library import DTYPES, CScalars, CUpdate, InstructionSet, library
from deep_opt_states.device.kernels.scalars import OnePassAdam, Scalars


class FusedAdam(OnePassAdam[CScalars]):
    """The C++ kernel, without the GIL, on ``num_threads`` threads, bound to ``cores``. Raise ``KernelUnavailable``."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        betas: tuple[float, float],
        *,
        adamw: bool,
        num_threads: int,
        cores: Sequence[int] = (),
        instruction_set: InstructionSet | None = None,
    ) -> None:
        super().__init__(arithmetic, betas, adamw=adamw)
        assert not cores or len(cores) == num_threads
        self._library = library()
        self._instruction_set = self._library.instruction_set if instruction_set is None else instruction_set
        assert self._instruction_set <= self._library.instruction_set
        self.num_threads = num_threads
        # The kernel reads this array through a pointer, which keeps no reference.
        self._cores = (ctypes.c_int32 * len(cores))(*cores) if cores else None

    def _arguments_of(self, scalars: Scalars) -> CScalars:
        return CScalars(**vars(scalars))

    def update_ranges(self, updates: Sequence[RangeUpdate]) -> None:
        """Update all ranges in one call, which wakes the threads once, or not at all for few elements."""
        described = []
        for update in updates:
            description = self._describe(update.tensors, update.element_range, update.updated)
            description.scalars = self._arguments[update.sub_group]
            described.append(description)
        self._library.update(described, self._instruction_set)

    def zero(self, tensors: AdamTensors) -> None:
        self._library.zero(self._describe(tensors, ElementRange.whole(tensors.master.numel())))

    def _describe(
        self, tensors: AdamTensors, element_range: ElementRange, updated: UpdatedStates | None = None
    ) -> CUpdate:
        _check(tensors, element_range.numel)
        if updated is None:
            updated = UpdatedStates(tensors.master, tensors.exp_avg, tensors.exp_avg_sq)
        else:
            new = replace(tensors, **updated._asdict())
            _check(new, element_range.numel)
            assert StateDtypes.found_in(new) == StateDtypes.found_in(tensors)
        return CUpdate(
            **{name: getattr(tensors, name).data_ptr() for name in (*STATES, "grad")},
            **{f"new_{name}": getattr(updated, name).data_ptr() for name in STATES},
            param=None if tensors.param is None else tensors.param.data_ptr(),
            numel=element_range.numel,
            # The cut may be outside the range.
            cut=self._arithmetic.cut(element_range.sub_group_numel) - element_range.begin,
            master_dtype=DTYPES[tensors.master.dtype],
            moment_dtype=DTYPES[tensors.exp_avg.dtype],
            grad_dtype=DTYPES[tensors.grad.dtype],
            param_dtype=DTYPES[None if tensors.param is None else tensors.param.dtype],
            tail=self._arithmetic.tail,
            num_threads=self.num_threads,
            cores=self._cores,
        )


def _check(tensors: AdamTensors, numel: int) -> None:
    """Raise ``AssertionError`` for tensors that do not fit: C++ would read and write outside their memory."""
    if StateDtypes.found_in(tensors) != FP32_STATES:
        assert tensors.grad.dtype != torch.float16
        assert tensors.param is None or tensors.param.dtype == torch.bfloat16
    for name in (*STATES, "grad", "param"):
        tensor = getattr(tensors, name)
        if tensor is None:
            continue
        assert tensor.is_cpu, (name, tensor.device)
        assert tensor.is_contiguous(), name
        assert tensor.numel() == numel, (name, tensor.shape)
        assert tensor.dtype in DTYPES, (name, tensor.dtype)
