"""What can be known of the GPU kernel without a GPU: what it says, and what Triton compiles it to."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from deep_opt_states.device.kernels.arithmetic import Tail
from tests.launch import REPOSITORY, Finished, environment

triton = pytest.importorskip("triton", reason="no Triton: pip install triton")

POINTERS = ("master", "exp_avg", "exp_avg_sq", "grad", "param")


def test_in_the_interpreter_it_has_the_bits_of_the_cpu_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = Finished(done.returncode, done.stdout).answers()
    assert found["differ"] == []
    assert len(found["others"]) == 6
    assert all(found["others"].values()), "another arithmetic is seen"


def ptx(grad: str, param: str, tail: Tail, capability: int) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deep_opt_states.device.kernels.triton_adam import ALIGNMENT_BYTES, Block
    from deep_opt_states.device.kernels.triton_kernel import OPTIONS, update

    constants = {"TAIL": int(tail), "BLOCK": Block().elements}
    types = {"grad": grad, "param": param, "numel": "i64", "cut": "i64", "decay_kind": "i32"}
    types |= dict.fromkeys(POINTERS[:3], "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "fp32") for name in update.arg_names}
    aligned = {(at,): [["tt.divisibility", ALIGNMENT_BYTES]] for at in range(len(POINTERS))}
    compiled = triton.compile(
        ASTSource(update, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={**OPTIONS, "num_warps": Block().warps},
    )
    return compiled.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize(("grad", "param"), [("*bf16", "*bf16"), ("*fp32", "*bf16"), ("*fp16", "*fp16")])
def test_every_operation_is_one_that_rounds_as_ieee_754_says(
    grad: str, param: str, tail: Tail, capability: int
) -> None:
    text = ptx(grad, param, tail, capability)
    arithmetic = set(re.findall(r"\b(?:fma|mul|add|sub|sqrt|div|rcp|rsqrt|ex2)\.[a-z.]*f32\b", text))
    expected = {"fma.rn.f32", "mul.rn.f32", "sqrt.rn.f32", "div.rn.f32"}
    assert arithmetic == expected | ({"add.rn.f32"} if tail is Tail.UNFUSED else set())
    assert "ftz" not in text, "denormals are kept"


def test_whole_blocks_are_loaded_and_stored_16_bytes_at_a_time() -> None:
    text = ptx("*fp32", "*bf16", Tail.GRADIENT_FUSED, 90)
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == 4
    assert len(re.findall(r"st\.global\.v4\.b32", text)) == 3
    assert ".shared" not in text.replace(".extern .shared", "")
