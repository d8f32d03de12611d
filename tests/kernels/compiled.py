"""Compile a Triton kernel for GPUs that need not be present, and count the fp32 instructions of the result."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from deep_opt_states.device.kernels import triton_kernel
from deep_opt_states.device.kernels.adam import StateDtypes
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.triton_adam import ALIGNMENT_BYTES, BlockShape, TritonAdam
from deep_opt_states.device.kernels.triton_kernel import OPTIONS, update

CAPABILITIES = (80, 90, 100, 120)
"""The compute capabilities of A100, of H100 and H200, of B200, and of the Blackwell GPUs of workstations."""

ELEMENTS_PER_THREAD = BlockShape().elements // (32 * BlockShape().warps)

NOT_ARITHMETIC = {"ld", "st", "mov", "setp", "selp", "cvt"}
"""Instructions that are no arithmetic. Conversions between fp16 and fp32 are in ``CONVERSIONS``."""

ROUNDED_ONCE = {"fma.rn.f32", "mul.rn.f32", "add.rn.f32", "sqrt.rn.f32", "div.rn.f32", "fma.rn.f32x2", "mul.rn.f32x2"}
"""Instructions that round once. ``add.rn.f32x2`` is missing: ptxas 12.9 fuses packed products into it despite .rn."""

CONVERSIONS = {"cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.f16x2.f32"}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The PTX and the machine code of a compiled kernel."""

    ptx: str
    cubin: bytes

    @property
    def arithmetic(self) -> Counter[str]:
        """Count the fp32 instructions in PTX by their full name, those on packed pairs (``.f32x2``) included."""
        names = re.findall(r"^\s*(?:@!?%p\d+\s+)?(\w+(?:\.\w+)*\.f32(?:x2)?)\s", self.ptx, re.M)
        return Counter(name for name in names if name.split(".")[0] not in NOT_ARITHMETIC)

    def operations(self, name: str) -> int:
        """Count the operations of PTX instruction ``name``, such as ``mul.rn.f32``; a packed instruction is two."""
        return self.arithmetic[name] + 2 * self.arithmetic[f"{name}x2"]

    def machine_operations(self, folder: Path) -> Counter[str]:
        """Count FADD, FMUL and FFMA in the machine code; a packed instruction is two.

        Instructions with a suffix, such as ``FMUL.FTZ``, are left out: they occur in the sequences that ptxas generates
        for a division or a square root, which are correctly rounded as a whole.
        """
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(self.cubin)
        nvdisasm = triton.knobs.nvidia.nvdisasm.path
        text = subprocess.run([nvdisasm, "-ndf", "-c", cubin], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(FADD|FMUL|FFMA)(2?)\s", text, re.M)
        counts: Counter[str] = Counter()
        for name, packed in found:
            counts[name] += 2 if packed else 1
        return counts


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    options: Mapping[str, object],
) -> Compiled:
    """Compile ``kernel``. ``types`` has Triton's type of each parameter that is neither fp32 nor a constant."""
    given = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: given.get(name, "fp32") for name in kernel.arg_names}
    pointers = [position for position, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    aligned = {(position,): [["tt.divisibility", ALIGNMENT_BYTES]] for position in pointers}
    found = triton.compile(
        ASTSource(kernel, signature, dict(constants), aligned),
        target=GPUTarget("cuda", capability, 32),
        options={**options, "num_warps": BlockShape().warps},
    )
    return Compiled(ptx=found.asm["ptx"], cubin=found.asm["cubin"])


def compile_update(
    grad: str,
    param: str,
    tail: Tail,
    capability: int,
    options: Mapping[str, object] = OPTIONS,
    states: tuple[str, str] = ("*fp32", "*fp32"),
) -> Compiled:
    """Compile the GPU Adam kernel as ``TritonAdam`` launches it, for aligned gradients and parameters.

    ``states`` are the types of the master weights and of the moments.
    """
    types = {"grad": grad, "param": param, "numel": "i64", "cut": "i64", "skip": "i64", "decay_kind": "i32"}
    types |= dict(zip(("master", "exp_avg", "exp_avg_sq"), (states[0], states[1], states[1]), strict=True))
    return compile_kernel(update, types, {"TAIL": int(tail), "BLOCK": BlockShape().elements}, capability, options)


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
        return GPUTarget("cuda", self._capability, 32)


class CompilingKernel:
    """A stand-in for Triton's kernel, whose launches compile for ``capability`` and run nothing.

    ``launched`` holds the kernel of each launch. Triton's own code chooses it, by the types and the alignment of the
    arguments.
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.launched: list[Compiled] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *arguments: Any, **named: Any) -> None:
        with mock.patch.object(driver, "_active", AbsentGpu(self._capability)):
            found = update.run(*arguments, grid=grid, warmup=True, **named)
        self.launched.append(Compiled(ptx=found.asm["ptx"], cubin=found.asm["cubin"]))


def compile_launches(
    grad: torch.dtype, param: torch.dtype | None, states: StateDtypes, tail: Tail, capability: int
) -> list[Compiled]:
    """Return the kernels that ``TritonAdam`` launches for these dtypes, one for each combination of alignments."""
    kernel = CompilingKernel(capability)
    with mock.patch.object(triton_kernel, "update", kernel):
        adam = TritonAdam(Arithmetic(16, tail), (0.9, 0.95), adamw=True, device=torch.device("cpu"))
    adam.compile([grad], [param], states)
    return kernel.launched


def check_rounding(compiled: Compiled) -> None:
    """Raise ``AssertionError`` unless each fp32 operation in PTX rounds once and to nearest, and denormals are kept."""
    others = set(compiled.arithmetic) - ROUNDED_ONCE
    assert not others, f"instructions that do not round once, to nearest: {sorted(others)}"
    conversions = set(re.findall(r"\bcvt\.[\w.]*f32[\w.]*", compiled.ptx)) - CONVERSIONS
    assert not conversions, f"conversions that may not be exact or round otherwise: {sorted(conversions)}"
    for word in ("ftz", "approx"):
        assert word not in compiled.ptx, word


def check_nothing_is_contracted(compiled: Compiled, sums: int, folder: Path) -> None:
    """Raise ``AssertionError`` if a product was fused into one of the ``sums`` of the source, or into a sum of the PTX.

    A contraction turns an FMUL and an FADD into one FFMA. A division may add FMULs, but no FADD.
    """
    found = compiled.machine_operations(folder)
    in_ptx = {name: compiled.operations(f"{name}.rn.f32") for name in ("add", "mul")}
    assert found["FADD"] == in_ptx["add"] == sums, f"{found} for {in_ptx}, and {sums} sums in the source"
    assert found["FMUL"] >= in_ptx["mul"], f"{found} for {in_ptx}"
