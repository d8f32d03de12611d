"""Adam in one pass over host memory, with the bits of stock DeepSpeed's three (scale, Adam, round to 16 bit)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import fields

import torch

from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors, Part, PartUpdate
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.library import DTYPES, CScalars, CUpdate, InstructionSet, library
from deep_opt_states.device.kernels.scalars import BetaPowers, Scalars

STATES = ("master", "exp_avg", "exp_avg_sq")


class FusedAdam:
    """``num_threads`` threads, the i-th on ``cores[i]`` if there are any. Another thread of Python runs meanwhile.

    Raises ``KernelUnavailable`` where the kernel can be neither loaded nor compiled.
    """

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
        assert not cores or len(cores) == num_threads
        self._library = library()
        self._instruction_set = self._library.instruction_set if instruction_set is None else instruction_set
        assert self._instruction_set <= self._library.instruction_set
        self._arithmetic = arithmetic
        self._betas, self._adamw = betas, adamw
        self.num_threads = num_threads
        # The kernel reads them at every call.
        self._cores = (ctypes.c_int32 * len(cores))(*cores) if cores else None
        self.restart()

    def restart(self) -> None:
        self._powers = BetaPowers(self._betas, adamw=self._adamw)
        self._scalars: list[Scalars] = []

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._scalars = self._powers.scalars(steps)

    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        part = part or Part.whole(tensors.master.numel())
        self.update_parts([PartUpdate(sub_group=sub_group, tensors=tensors, part=part)])

    def update_parts(self, updates: Sequence[PartUpdate]) -> None:
        """Wake the threads once for all ``updates``, and not at all where these are small together."""
        described = []
        for each in updates:
            update = self._describe(each.tensors, each.part)
            scalars = self._scalars[each.sub_group]
            update.scalars = CScalars(**{field.name: getattr(scalars, field.name) for field in fields(scalars)})
            described.append(update)
        self._library.update(described, self._instruction_set)

    def zero(self, tensors: AdamTensors) -> None:
        self._library.zero(self._describe(tensors, Part.whole(tensors.master.numel())))

    def close(self) -> None:
        """Nothing to free."""

    def _describe(self, tensors: AdamTensors, part: Part) -> CUpdate:
        """Without scalars."""
        _check(tensors, part.numel)
        return CUpdate(
            **{name: getattr(tensors, name).data_ptr() for name in (*STATES, "grad")},
            param=None if tensors.param is None else tensors.param.data_ptr(),
            numel=part.numel,
            # Where the part ends before it, every element is below the cut; where it begins after it, none.
            cut=self._arithmetic.cut(part.of) - part.begin,
            grad_dtype=DTYPES[tensors.grad.dtype],
            param_dtype=DTYPES[None if tensors.param is None else tensors.param.dtype],
            tail=self._arithmetic.tail,
            num_threads=self.num_threads,
            cores=self._cores,
        )


def _check(tensors: AdamTensors, numel: int) -> None:
    """C++ would read and write whatever is there."""
    for name in (*STATES, "grad", "param"):
        tensor = getattr(tensors, name)
        if tensor is None:
            continue
        assert tensor.is_cpu, (name, tensor.device)
        assert tensor.is_contiguous(), name
        assert tensor.numel() == numel, (name, tensor.shape)
        assert tensor.dtype == torch.float32 if name in STATES else tensor.dtype in DTYPES, (name, tensor.dtype)
