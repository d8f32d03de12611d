"""Check the bits of each NaN that the C++ kernel writes.

IEEE 754 leaves the sign and the payload of a NaN open; those of stock are the processor's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deep_opt_states.device.kernels.adam import AdamTensors
from tests.kernels.adam_steps import STEP, Stock, copied, fused, random_tensors

NUMEL = 1003
QUIET = [0x7FC00000, 0x7FC10000, -0x400000, -0x10000]
"""The fp32 bits of NaNs that bf16 can represent, too: with both signs, and with and without a payload."""


def nans(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(QUIET, dtype=torch.int32).view(torch.float32).repeat(NUMEL)[:NUMEL].to(dtype)


def in_states(name: str) -> Callable[[AdamTensors, torch.Tensor], None]:
    def write(tensors: AdamTensors, grad: torch.Tensor) -> None:
        getattr(tensors, name).copy_(nans())

    return write


def in_gradient(tensors: AdamTensors, grad: torch.Tensor) -> None:
    # The upper halves are copied, since PyTorch's conversion would map all of these NaNs to a single one.
    grad.copy_(nans() if grad.dtype == torch.float32 else nans().view(torch.bfloat16)[1::2])


def by_an_invalid_operation(tensors: AdamTensors, grad: torch.Tensor) -> None:
    """Make the kernel take the square root of a negative number."""
    tensors.exp_avg_sq.fill_(float("-inf"))


SOURCES = {
    "master": in_states("master"),
    "exp_avg": in_states("exp_avg"),
    "exp_avg_sq": in_states("exp_avg_sq"),
    "gradient": in_gradient,
    "invalid operation": by_an_invalid_operation,
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_have_the_nan_of_stock_and_bf16_parameters_have_0x7fc0(
    source: str, grad_dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    ours, gradient = random_tensors(NUMEL, grad_dtype, param_dtype, seed=3)
    grad = gradient()
    SOURCES[source](ours, grad)
    ours.grad.copy_(grad)
    theirs = copied(ours)
    kernel = fused()
    kernel.begin_step([STEP])
    kernel.update(0, ours)
    Stock(theirs, adamw=True).update(STEP, grad)
    assert theirs.master.isnan().all()
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(bits(getattr(ours, name)), bits(getattr(theirs, name))), name
    assert ours.param is not None
    assert theirs.param is not None
    assert theirs.param.isnan().all()
    if param_dtype == torch.bfloat16:
        # PyTorch's vectors write 0xffff here, and its loop for single elements 0x7fc0.
        assert set(bits(ours.param).tolist()) == {0x7FC0}
    else:
        assert torch.equal(bits(ours.param), bits(theirs.param))
