"""Check that the GPU kernel refuses wrong tensors before it is launched, which needs no GPU."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels import triton_adam
from deep_opt_states.device.kernels.adam import STATES, AdamTensors, ElementRange, RangeUpdate
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from tests.kernels.adam_steps import BETAS, STEP, random_tensors

NUMEL = 64
RANGES = [ElementRange.whole(NUMEL), ElementRange(begin=5, end=NUMEL, sub_group_numel=NUMEL)]

TENSORS, _ = random_tensors(NUMEL, torch.bfloat16, torch.bfloat16, seed=0)


class Launched(TritonAdam):
    """A kernel that records the tensors of each launch and does not launch."""

    launches: list[AdamTensors]

    def _launch(self, keywords: dict[str, Any], operands: triton_adam._Operands) -> None:
        self.launches.append(AdamTensors(**dict(zip((*STATES, "grad", "param"), operands.positional, strict=False))))


@pytest.fixture
def adam() -> Launched:
    kernel = Launched(Arithmetic(16, Tail.UNFUSED), BETAS, adamw=True, device=torch.device("cpu"))
    kernel.launches = []
    kernel.begin_step([STEP])
    return kernel


@pytest.mark.parametrize("element_range", RANGES, ids=str)
def test_tensors_that_fit_are_launched_from_a_multiple_of_16_bytes_on(
    adam: Launched, element_range: ElementRange
) -> None:
    adam.update(0, TENSORS.narrow(element_range), element_range)
    (launched,) = adam.launches
    for name in STATES:
        assert getattr(launched, name).data_ptr() % 16 == 0
        assert getattr(launched, name).numel() == element_range.numel + element_range.begin % 4


@pytest.mark.parametrize("element_range", RANGES, ids=str)
@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "grad", "param"])
def test_a_strided_tensor_is_refused(adam: Launched, element_range: ElementRange, name: str) -> None:
    strided = torch.zeros(2 * NUMEL, dtype=getattr(TENSORS, name).dtype)[::2]
    whole = replace(TENSORS, **{name: strided})
    with pytest.raises(AssertionError):
        adam.update(0, whole.narrow(element_range), element_range)
    assert adam.launches == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"exp_avg": TENSORS.exp_avg[:-1]},
        {"master": TENSORS.master.double()},
        {"grad": TENSORS.grad.double()},
        {"exp_avg_sq": torch.zeros(NUMEL + 1)[1:]},
        {"param": torch.zeros(NUMEL, dtype=torch.bfloat16, device="meta")},
    ],
    ids=["short", "fp64 master", "fp64 gradient", "not aligned", "elsewhere"],
)
def test_tensor_that_does_not_fit_is_refused(adam: Launched, wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(AssertionError):
        adam.update(0, replace(TENSORS, **wrong))
    assert adam.launches == []


def test_range_without_the_elements_before_it_is_refused(adam: Launched) -> None:
    """Check it because the kernel begins at the last multiple of 16 bytes, which must be in the same memory."""
    element_range = RANGES[1]
    copied = TENSORS.narrow(element_range).map(torch.Tensor.clone)
    with pytest.raises(AssertionError):
        adam.update(0, copied, element_range)
    assert adam.launches == []


def test_operands_are_derived_once_for_all_steps_and_live_no_longer_than_the_update(adam: Launched) -> None:
    """Check it because the checks and views of one range take twenty times as long as what a later step needs."""
    tensors = TENSORS.map(torch.Tensor.clone)
    update = RangeUpdate(sub_group=0, tensors=tensors, element_range=RANGES[0])
    other = RangeUpdate(sub_group=0, tensors=TENSORS, element_range=RANGES[0])
    with mock.patch.object(triton_adam, "_check", wraps=triton_adam._check) as check:
        for _ in range(3):
            adam.begin_step([STEP])
            adam.update_ranges([update, other])
    assert check.call_count == 2
    assert [launched.master.data_ptr() for launched in adam.launches] == [
        tensors.master.data_ptr(), TENSORS.master.data_ptr()
    ] * 3  # fmt: skip
    memory = weakref.ref(tensors.grad.untyped_storage())
    check.reset_mock()
    del update, tensors
    adam.launches.clear()
    assert memory() is None
