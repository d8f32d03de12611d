"""Check the GPU kernel without a GPU: its source in the interpreter, and the code that Triton compiles it to."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from deep_opt_states.device.kernels.adam import BF16_MASTERS, BF16_STATES, FP32_STATES, StateDtypes
from deep_opt_states.device.kernels.arithmetic import Tail
from deep_opt_states.device.kernels.triton_kernel import OPTIONS
from tests.kernels.adam_steps import GRADS, PARAMS
from tests.kernels.compiled import (
    CAPABILITIES,
    ELEMENTS_PER_THREAD,
    check_nothing_is_contracted,
    check_rounding,
    compile_kernel,
    compile_launches,
    compile_update,
)
from tests.launch import run_ranks
from tests.tiers import thorough

pytestmark = pytest.mark.usefixtures("compiled_anew")

DTYPES = [("*bf16", "*bf16"), ("*fp32", "*bf16"), ("*fp16", "*fp16")]
FUSION = {**OPTIONS, "enable_fp_fusion": True}
SUMS = {Tail.UNFUSED: 6 * ELEMENTS_PER_THREAD, Tail.GRADIENT_FUSED: 0, Tail.MOMENT_FUSED: 0}
"""Sums per thread: the kernel calls ``_multiply_add`` six times per element, which adds only in an unfused tail."""

Dtypes = tuple[torch.dtype, torch.dtype | None, StateDtypes]
LAUNCHED: list[Dtypes] = [
    *((grad, param, FP32_STATES) for grad, param in product(GRADS, PARAMS)),
    *product((torch.float32, torch.bfloat16), (torch.bfloat16, None), (BF16_MASTERS, BF16_STATES)),
]
"""The dtypes of the gradient, of the parameters and of the states with which the kernel can be launched."""


def some_launched(tail: Tail, capability: int) -> list[Dtypes]:
    """Return a part of ``LAUNCHED``. Each combination belongs to at least one tail and capability."""
    parts = list(product(CAPABILITIES, Tail))
    return LAUNCHED[parts.index((capability, tail)) :: len(parts)]


@pytest.mark.promise("P2")
def test_interpreted_kernel_has_the_bits_of_the_cpu_kernel() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.kernels.interpreted"], timeout_s=300, fresh=True)
    assert finished.returncode == 0, finished.output[-3000:]
    (found,) = finished.answers()
    assert found["differ"] == []
    assert len(found["others"]) == 6
    assert all(found["others"].values()), "another arithmetic gives other bits"


@pytest.mark.promise("P2")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize(("grad", "param"), DTYPES)
def test_every_operation_rounds_as_ieee_754_requires(grad: str, param: str, tail: Tail, capability: int) -> None:
    compiled = compile_update(grad, param, tail, capability)
    check_rounding(compiled)
    assert compiled.operations("add.rn.f32") == SUMS[tail]
    assert compiled.operations("sqrt.rn.f32") == 2 * ELEMENTS_PER_THREAD, (
        "one in whole blocks, and one in partial blocks"
    )
    assert compiled.operations("div.rn.f32") == 2 * ELEMENTS_PER_THREAD
    assert compiled.operations("mul.rn.f32") > 0
    assert compiled.operations("fma.rn.f32") > 0


@pytest.mark.promise("P2")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("states", [("*bf16", "*fp32"), ("*bf16", "*bf16")])
def test_every_operation_on_bf16_states_rounds_as_ieee_754_requires(
    states: tuple[str, str], capability: int, tmp_path: Path
) -> None:
    compiled = compile_update("*bf16", "*bf16", Tail.UNFUSED, capability, states=states)
    check_rounding(compiled)
    check_nothing_is_contracted(compiled, SUMS[Tail.UNFUSED], tmp_path)


@pytest.mark.promise("P2")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("chosen", ["some", thorough("all")])
def test_every_launched_kernel_rounds_as_ieee_754_requires_and_contracts_nothing(
    chosen: str, tail: Tail, capability: int, tmp_path: Path
) -> None:
    for grad, param, states in LAUNCHED if chosen == "all" else some_launched(tail, capability):
        compiled = compile_launches(grad, param, states, tail, capability)
        assert len({kernel.ptx for kernel in compiled}) == (4 if param is not None else 2), "one for each alignment"
        for kernel in compiled:
            check_rounding(kernel)
            check_nothing_is_contracted(kernel, SUMS[tail], tmp_path)
            assert kernel.operations("sqrt.rn.f32") == kernel.operations("div.rn.f32") == 2 * ELEMENTS_PER_THREAD


def test_some_launches_have_every_combination_of_dtypes() -> None:
    some = {found for tail, capability in product(Tail, CAPABILITIES) for found in some_launched(tail, capability)}
    assert some == set(LAUNCHED)


def test_compile_update_compiles_the_kernel_that_is_launched() -> None:
    aligned, *_ = compile_launches(torch.bfloat16, torch.bfloat16, FP32_STATES, Tail.UNFUSED, 80)
    assert aligned.ptx == compile_update("*bf16", "*bf16", Tail.UNFUSED, 80).ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tail", Tail)
def test_the_machine_code_contracts_nothing(tail: Tail, capability: int, tmp_path: Path) -> None:
    check_nothing_is_contracted(compile_update("*bf16", "*bf16", tail, capability), SUMS[tail], tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiled_with_fp_fusion_is_refused(capability: int) -> None:
    with pytest.raises(AssertionError, match=re.escape("mul.f32")):
        check_rounding(compile_update("*bf16", "*bf16", Tail.UNFUSED, capability, FUSION))


@triton.jit
def multiply_add(a, b, c, BLOCK: tl.constexpr):
    """Compute c += a * b, and leave the fusion to the compiler."""
    at = tl.arange(0, BLOCK)
    tl.store(c + at, tl.load(a + at) * tl.load(b + at) + tl.load(c + at))


@pytest.mark.parametrize("capability", [80, 90])
def test_product_fused_into_a_sum_is_detected(capability: int, tmp_path: Path) -> None:
    """Check it with a kernel that leaves the fusion to the compiler: the Adam kernel's sums cannot be contracted."""
    types = dict.fromkeys("abc", "*fp32")
    constants = {"BLOCK": 256}  # one element per thread
    check_nothing_is_contracted(compile_kernel(multiply_add, types, constants, capability, OPTIONS), 1, tmp_path)
    fused = compile_kernel(multiply_add, types, constants, capability, FUSION)
    assert fused.machine_operations(tmp_path) == {"FFMA": 1}
    with pytest.raises(AssertionError):
        check_nothing_is_contracted(fused, 1, tmp_path)


def test_whole_blocks_are_loaded_and_stored_16_bytes_at_a_time() -> None:
    text = compile_update("*fp32", "*bf16", Tail.GRADIENT_FUSED, 90).ptx
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == 4
    assert len(re.findall(r"st\.global\.v4\.b32", text)) == 3
    assert ".shared" not in text.replace(".extern .shared", "")
