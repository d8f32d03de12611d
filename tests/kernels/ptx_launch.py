"""Launch the GPU Adam kernel as Triton does on a GPU, but interpret the compiled PTX on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from deep_opt_states.device.kernels import triton_kernel
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from tests.kernels.adam_steps import BETAS
from tests.kernels.ptx_interpreter import LANES, Launch, interpret
from tests.kernels.ptx_memory import EmulatedMemory
from tests.kernels.ptx_parser import PtxError, parse

KERNEL = triton_kernel.update
READ_ONLY = ("grad",)


class AbsentGpu:
    """The part of Triton's driver that a compilation uses, for a GPU that need not be present."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """Return a number for each capability, since Triton keeps the compiled kernels by the device's number."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, LANES)


class PtxKernel:
    """A stand-in for Triton's kernel whose launches compile for ``capability`` and interpret the PTX.

    ``edited`` has PTX to interpret in place of other PTX, and ``options`` replaces options of the launch. ``launched``
    has the PTX that Triton compiled for each launch.
    """

    def __init__(
        self, capability: int, edited: Mapping[str, str] | None = None, options: Mapping[str, object] | None = None
    ) -> None:
        self._capability, self._edited, self._options = capability, edited or {}, options or {}
        self.launched: list[str] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *arguments: Any, **named: Any) -> None:
        named |= self._options
        # Triton's own code chooses the variant that it compiles, from the types and the alignment of the arguments.
        with mock.patch.object(driver, "_active", AbsentGpu(self._capability)):
            compiled = KERNEL.run(*arguments, grid=grid, warmup=True, **named)
        ptx = compiled.asm["ptx"]
        self.launched.append(ptx)
        program = parse(self._edited.get(ptx, ptx))
        if program.threads != LANES * named["num_warps"]:
            raise PtxError(f"{program.threads} threads per block")
        types = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        values = dict(zip(KERNEL.arg_names, arguments, strict=False)) | named
        tensors = {name: values[name] for name, kind in types.items() if kind.startswith("*")}
        # Triton appends two pointers to memory that the kernel may request. This one requests none.
        metadata = compiled.metadata
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
        launch = Launch(
            blocks=grid[0],
            parameters=[*(_bits(values[name], kind) for name, kind in types.items()), 0, 0],
            tensors=[
                _memory(tensor[values["skip"] : values["numel"]], writable=name not in READ_ONLY)
                for name, tensor in tensors.items()
            ],
            shared_bytes=metadata.shared,
        )
        interpret(program, launch)


def _memory(tensor: torch.Tensor, *, writable: bool) -> EmulatedMemory:
    """Return the memory of ``tensor``, at the address that it has on this machine."""
    return EmulatedMemory(tensor.view(torch.int16).numpy().view(np.uint16), tensor.data_ptr(), writable=writable)


def _bits(value: Any, kind: str) -> int:
    """Return the bits of an argument as Triton passes them."""
    if kind.startswith("*"):
        return int(value.data_ptr())
    if kind == "fp32":
        # A GPU would get another number than TritonAdam passes if the conversion rounded.
        assert np.isnan(value) or float(np.float32(value)) == value, value
        return int(np.float32(value).view(np.uint32))
    bits = int(kind.removeprefix("i"))
    assert -(2 ** (bits - 1)) <= value < 2 ** (bits - 1), value
    return int(value % 2**bits)


def interpreted_adam(kernel: PtxKernel, arithmetic: Arithmetic, *, adamw: bool) -> TritonAdam:
    """Return the GPU kernel with ``kernel`` in place of Triton's."""
    with mock.patch.object(triton_kernel, "update", kernel):
        return TritonAdam(arithmetic, BETAS, adamw=adamw, device=torch.device("cpu"))
