"""Check the code that Triton compiles the GPU kernel to, without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from deep_opt_states.device.kernels import triton_kernel
from deep_opt_states.device.kernels.adam import BF16_MASTERS, BF16_STATES, FP32_STATES, StateDtypes
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.triton_adam import BlockShape, TritonAdam
from deep_opt_states.device.kernels.triton_kernel import OPTIONS, update
from tests.kernels.adam_steps import GRADS, PARAMS

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
        """Count FADD, FMUL and FFMA, packed ones twice, but not in divisions, where they have a suffix."""
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(self.cubin)
        nvdisasm = triton.knobs.nvidia.nvdisasm.path
        text = subprocess.run([nvdisasm, "-ndf", "-c", cubin], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(FADD|FMUL|FFMA)(2?)\s", text, re.M)
        counts: Counter[str] = Counter()
        for name, packed in found:
            counts[name] += 2 if packed else 1
        return counts


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


def compiled(kernel: Any, capability: int, *arguments: Any, grid: tuple[int] = (1,), **named: Any) -> Compiled:
    """Return the kernel of a launch, which Triton chooses by the types and the alignment of the arguments."""
    with mock.patch.object(driver, "_active", AbsentGpu(capability)):
        found = kernel.run(*arguments, grid=grid, warmup=True, **named)
    return Compiled(ptx=found.asm["ptx"], cubin=found.asm["cubin"])


class CompilingKernel:
    """A stand-in for Triton's kernel, whose launches compile for ``capability`` and run nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.launched: list[Compiled] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.launched.append(compiled(update, self._capability, *arguments, grid=grid, **named))

        return launch


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
    """Raise if a product was fused into a sum, which turns FMUL and FADD into one FFMA. A division may add FMULs."""
    found = compiled.machine_operations(folder)
    in_ptx = {name: compiled.operations(f"{name}.rn.f32") for name in ("add", "mul")}
    assert found["FADD"] == in_ptx["add"] == sums, f"{found} for {in_ptx}, and {sums} sums in the source"
    assert found["FMUL"] >= in_ptx["mul"], f"{found} for {in_ptx}"


@pytest.fixture(scope="module", autouse=True)
def _compiled_anew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache, since Triton would otherwise find the kernels of an earlier run in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


SUMS = {Tail.UNFUSED: 6 * ELEMENTS_PER_THREAD, Tail.GRADIENT_FUSED: 0, Tail.MOMENT_FUSED: 0}
"""Sums per thread: the kernel calls ``_multiply_add`` six times per element, which adds only in an unfused tail."""


def launched() -> Iterator[Any]:
    """Yield the dtypes of gradient, parameters and states, each with one of the capabilities and tails in turn."""
    bf16 = product((torch.float32, torch.bfloat16), (torch.bfloat16, None), (BF16_MASTERS, BF16_STATES))
    dtypes = (*((grad, param, FP32_STATES) for grad, param in product(GRADS, PARAMS)), *bf16)
    for number, (cell, each) in enumerate(zip(cycle(product(CAPABILITIES, Tail)), dtypes, strict=False)):
        yield pytest.param(*cell, *each, marks=() if number % 5 in (1, 3) else pytest.mark.thorough)


@pytest.mark.P2
@pytest.mark.parametrize(("capability", "tail", "grad", "param", "states"), launched())
def test_every_launched_kernel_rounds_as_ieee_754_requires_and_contracts_nothing(
    capability: int, tail: Tail, grad: torch.dtype, param: torch.dtype | None, states: StateDtypes, tmp_path: Path
) -> None:
    kernels = compile_launches(grad, param, states, tail, capability)
    assert len({kernel.ptx for kernel in kernels}) == (4 if param is not None else 2), "one for each alignment"
    for kernel in kernels:
        check_rounding(kernel)
        check_nothing_is_contracted(kernel, SUMS[tail], tmp_path)
        # One in whole blocks, and one in partial blocks.
        assert kernel.operations("sqrt.rn.f32") == kernel.operations("div.rn.f32") == 2 * ELEMENTS_PER_THREAD
        assert kernel.operations("mul.rn.f32") > 0
        assert kernel.operations("fma.rn.f32") > 0


@triton.jit
def multiply_add(a, b, c, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(c + at, tl.load(a + at) * tl.load(b + at) + tl.load(c + at))


@pytest.mark.parametrize("capability", [80, 90])
def test_product_fused_into_a_sum_is_detected(capability: int, tmp_path: Path) -> None:
    """Check it with a kernel that leaves the fusion to the compiler: the Adam kernel's sums cannot be contracted."""
    tensors, options = [torch.zeros(256) for _ in range(3)], {"num_warps": BlockShape().warps, "BLOCK": 256}
    unfused = compiled(multiply_add, capability, *tensors, **options, **OPTIONS)
    check_nothing_is_contracted(unfused, 1, tmp_path)
    fused = compiled(multiply_add, capability, *tensors, **options, **{**OPTIONS, "enable_fp_fusion": True})
    assert fused.machine_operations(tmp_path) == {"FFMA": 1}
    with pytest.raises(AssertionError):
        check_nothing_is_contracted(fused, 1, tmp_path)
