"""Check that the comparison of PTX with the CPU kernel notices wrong instructions: every edit of the PTX is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from deep_opt_states.device.kernels.arithmetic import Tail
from tests.kernels.adversarial_tensors import Offsets
from tests.kernels.ptx_launch import PtxKernel
from tests.kernels.ptx_parser import PtxError
from tests.kernels.test_ptx import PtxCase

pytestmark = pytest.mark.usefixtures("compiled_anew")

BF16 = PtxCase(
    width=3069,
    tail=Tail.UNFUSED,
    grad=torch.bfloat16,
    param=torch.bfloat16,
    offsets=Offsets(),
    adamw=True,
    seed=0,
)
KERNELS: Mapping[str, tuple[int, PtxCase]] = {
    "pairs of fp32": (100, BF16),
    "fp16": (80, replace(BF16, tail=Tail.MOMENT_FUSED, grad=torch.float16, param=torch.float16)),
    "shared memory": (90, replace(BF16, offsets=Offsets(param=1))),
    "matrices": (120, replace(BF16, tail=Tail.GRADIENT_FUSED, param=torch.float32, offsets=Offsets(param=1))),
}
"""A kernel with each kind of instruction, and the compute capability that it is compiled for."""

ALWAYS_TRUE = {"shared memory": 3, "matrices": 3}
"""Comparisons that need not be noticed: that skipped elements, which are fewer than 4, are before the 256th."""

LINE = re.compile(r"\t(?:@!?%p\d+ )?(?P<name>[a-z][\w.:]*)(?:\s+(?P<operands>.*))?;")
FLOATING_POINT = re.compile(r"(?:add|mul|fma|div|sqrt|cvt)\.rn\.[\w.]+|cvt\.f32\.f16")
BITS = {"%r": 32, "%rs": 16, "%rd": 64}


def dropped(name: str, operands: list[str], line: str) -> str | None:
    # Triton initializes the registers of all loads, but only those of masked loads are used.
    return None if name.startswith("mov.u") and operands[1] == "0x0" else ""


def changed_in_the_last_place(name: str, operands: list[str], line: str) -> str | None:
    if not FLOATING_POINT.fullmatch(name):
        return None
    bits = BITS[operands[0].rstrip("0123456789")]
    return f"{line} add.s{bits} {operands[0]}, {operands[0]}, 1;"


def rounded_twice(name: str, operands: list[str], line: str) -> str | None:
    if not name.startswith("fma."):
        return None
    kind = name.removeprefix("fma.rn.")
    register = f"\t.reg .b{64 if kind == 'f32x2' else 32} %product<1>;"
    result, a, b, c = operands
    return f"{register}\n\tmul.rn.{kind} %product0, {a}, {b}; add.rn.{kind} {result}, %product0, {c};"


def chosen_the_other_way(name: str, operands: list[str], line: str) -> str | None:
    if not name.startswith("selp."):
        return None
    result, a, b, condition = operands
    return f"\t{name} {result}, {b}, {a}, {condition};"


def compared_with_equality_reversed(name: str, operands: list[str], line: str) -> str | None:
    other = {"setp.gt.s64": "setp.ge.s64", "setp.le.s64": "setp.lt.s64"}
    # The first two comparisons choose between two paths that both give the right bits.
    return None if name not in other or operands[0] in ("%p1", "%p2") else line.replace(name, other[name])


def another_nan(name: str, operands: list[str], line: str) -> str | None:
    return re.sub("0x7FC0|32704", "32705", line) if name == "selp.b16" else None


def rounded_half_up(name: str, operands: list[str], line: str) -> str | None:
    return line.replace("32767", "32768") if operands[-1:] == ["32767"] else None


Edit = Callable[[str, list[str], str], str | None]
EDITS: list[Edit] = [
    dropped,
    changed_in_the_last_place,
    rounded_twice,
    chosen_the_other_way,
    compared_with_equality_reversed,
    another_nan,
    rounded_half_up,
]


def mutants(ptx: str, edit: Edit) -> Iterator[tuple[str, tuple[str, bool], str]]:
    """Yield each edited line, the name of its instruction and whether it is for partial blocks, and the whole PTX."""
    end = ptx.index("\n}\n")
    lines = ptx[:end].split("\n")
    partial = False
    for index, line in enumerate(lines):
        partial |= line.startswith("$L__BB0_2")
        match = LINE.fullmatch(line)
        if match is None:
            continue
        operands = re.sub(r"[{}]", "", match["operands"] or "").replace(" ", "").split(",")
        replacement = edit(match["name"], operands, line)
        if replacement is not None:
            edited = "\n".join([*lines[:index], replacement, *lines[index + 1 :]]) + ptx[end:]
            yield line.strip(), (match["name"], partial), edited


def ptx_of(name: str) -> str:
    """Return the PTX of the kernel, which gives the right bits without an edit."""
    capability, case = KERNELS[name]
    right = PtxKernel(capability)
    assert next(case.differences(right), None) is None
    return right.launched[0]


def is_noticed(kernel: PtxKernel, case: PtxCase) -> bool:
    """Return whether ``kernel`` is refused or gives other bits.

    The cuts and the kinds of decay differ from try to try, and so do the values: only one element shows where a
    comparison ends.
    """
    for number in range(16):
        tried = replace(case, width=3056 + number, adamw=number % 4 < 2, seed=number)
        try:
            if next(tried.differences(kernel), None):
                return True
        except PtxError:
            return True
    return False


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_each_kind_of_wrong_instruction_is_noticed(edit: Edit) -> None:
    """Check it for the first instruction of each name in whole blocks, and the first in partial blocks."""
    edited = set()
    for name, (capability, case) in KERNELS.items():
        ptx = ptx_of(name)
        for line, kind, mutant in mutants(ptx, edit):
            if kind not in edited:
                edited.add(kind)
                assert is_noticed(PtxKernel(capability, {ptx: mutant}), case), f"{name}: {line}"
    assert edited


@pytest.mark.thorough
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", KERNELS)
def test_every_wrong_instruction_is_noticed(name: str, edit: Edit) -> None:
    capability, case = KERNELS[name]
    ptx = ptx_of(name)
    unnoticed = [
        line for line, _, mutant in mutants(ptx, edit) if not is_noticed(PtxKernel(capability, {ptx: mutant}), case)
    ]
    if edit is compared_with_equality_reversed:
        assert all(line.startswith("setp.le.") for line in unnoticed), unnoticed
        assert len(unnoticed) == ALWAYS_TRUE.get(name, 0), unnoticed
    else:
        assert unnoticed == []


@pytest.mark.parametrize("tail", Tail)
def test_another_tail_is_noticed(tail: Tail) -> None:
    others = [other for other in Tail if other != tail]
    case = replace(BF16, tail=tail)
    for other in others:
        assert next(case.differences(PtxKernel(90), cpu_tail=other), None)


def test_instructions_that_leave_the_rounding_to_the_assembler_are_refused() -> None:
    kernel = PtxKernel(90, options={"enable_fp_fusion": True})
    with pytest.raises(PtxError, match=r"unknown instruction (mul|add|fma)\.f32"):
        list(BF16.differences(kernel))
