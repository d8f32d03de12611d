"""Make sub-group states with random contents, and update them serially."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.runtime.state import SubGroupState

NAMES = ("master", "exp_avg", "exp_avg_sq", "param")


def make_states(
    numels: Sequence[int], dtype: torch.dtype, seed: int = 0, grad_dtypes: Sequence[torch.dtype] = ()
) -> list[SubGroupState]:
    """Return random states. ``grad_dtypes`` has one dtype per sub-group; if it is empty, all gradients are fp32."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for numel, grad_dtype in zip(numels, grad_dtypes or [torch.float32] * len(numels), strict=True):
        master = torch.randn(numel, generator=generator)
        states.append(
            SubGroupState(
                master=master,
                exp_avg=torch.randn(numel, generator=generator),
                exp_avg_sq=torch.rand(numel, generator=generator),
                grad=torch.empty(numel, dtype=grad_dtype),
                param=master.to(dtype).clone(),
                rounded=master if dtype == torch.float32 else torch.empty(numel, dtype=dtype),
            )
        )
    return states


def gradients(numels: Sequence[int], step: int) -> list[torch.Tensor]:
    """Return random fp32 gradients, the same for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(numel, generator=generator) for numel in numels]


def fill_gradients(states: Sequence[SubGroupState], step: int) -> None:
    for state, gradient in zip(states, gradients([state.numel for state in states], step), strict=True):
        state.grad.copy_(gradient)


def update_serially(states: Sequence[SubGroupState], adam: AdamKernel, steps: Sequence[AdamStep]) -> None:
    """Update one sub-group after another in host memory, as stock DeepSpeed does. This is the reference."""
    adam.begin_step(steps)
    for index, state in enumerate(states):
        adam.update(
            index,
            AdamTensors(
                master=state.master,
                exp_avg=state.exp_avg,
                exp_avg_sq=state.exp_avg_sq,
                grad=state.grad,
                param=state.param,
            ),
        )


def assert_equal(found: Sequence[SubGroupState], expected: Sequence[SubGroupState]) -> None:
    for index, (ours, reference) in enumerate(zip(found, expected, strict=True)):
        for name in NAMES:
            assert torch.equal(getattr(ours, name), getattr(reference, name)), f"{name} of sub-group {index}"
