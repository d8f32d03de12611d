"""What the GPU kernel is given is checked before it is launched; the checks need no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_opt_states.device.kernels.adam import AdamTensors, Part
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.triton_adam import STATES, TritonAdam
from tests.kernels.training import BETAS, STEP, random_tensors

NUMEL = 64
PARTS = [Part.whole(NUMEL), Part(begin=5, end=NUMEL, of=NUMEL)]

TENSORS, _ = random_tensors(NUMEL, torch.bfloat16, torch.bfloat16, seed=0)


class Launched(TritonAdam):
    """Keeps what the kernel would be launched with."""

    launches: list[AdamTensors]

    def _launch(self, scalars: Any, tensors: AdamTensors, **numbers: Any) -> None:
        self.launches.append(tensors)


@pytest.fixture
def adam() -> Launched:
    kernel = Launched(Arithmetic(16, Tail.UNFUSED), BETAS, adamw=True, device=torch.device("cpu"))
    kernel.launches = []
    kernel.begin_step([STEP])
    return kernel


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_tensors_that_fit_are_launched_from_a_multiple_of_16_bytes_on(adam: Launched, part: Part) -> None:
    adam.update(0, TENSORS.part(part), part)
    (launched,) = adam.launches
    for name in STATES:
        assert getattr(launched, name).data_ptr() % 16 == 0
        assert getattr(launched, name).numel() == part.numel + part.begin % 4


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "grad", "param"])
def test_a_strided_tensor_is_refused(adam: Launched, part: Part, name: str) -> None:
    strided = torch.zeros(2 * NUMEL, dtype=getattr(TENSORS, name).dtype)[::2]
    whole = replace(TENSORS, **{name: strided})
    with pytest.raises(AssertionError):
        adam.update(0, whole.part(part), part)
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
def test_what_does_not_fit_is_refused(adam: Launched, wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(AssertionError):
        adam.update(0, replace(TENSORS, **wrong))
    assert adam.launches == []


def test_a_part_without_the_elements_before_it_is_refused(adam: Launched) -> None:
    """The kernel begins at the last multiple of 16 bytes, which must be in the same memory."""
    part = PARTS[1]
    copied = TENSORS.part(part).each(torch.Tensor.clone)
    with pytest.raises(AssertionError):
        adam.update(0, copied, part)
    assert adam.launches == []
