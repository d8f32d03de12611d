"""Make the states of units with random contents, and update them serially."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, ElementRange
from deep_opt_states.runtime.state import Resident, Slot, UnitState
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule

NAMES = ("master", "exp_avg", "exp_avg_sq", "param")


def make_states(
    numels: Sequence[int], dtype: torch.dtype, seed: int = 0, grad_dtypes: Sequence[torch.dtype] = ()
) -> list[UnitState]:
    """Return random states, each unit a sub-group of its own. Until ``place`` is called, the CPU updates all of them.

    ``grad_dtypes`` has one dtype per unit; if it is empty, all gradients are fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    states = []
    for index, (numel, grad_dtype) in enumerate(zip(numels, grad_dtypes or [torch.float32] * len(numels), strict=True)):
        master = torch.randn(numel, generator=generator)
        states.append(
            UnitState(
                placement=Placement.CPU,
                sub_group=index,
                elements=ElementRange.whole(numel),
                master=master,
                exp_avg=torch.randn(numel, generator=generator),
                exp_avg_sq=torch.rand(numel, generator=generator),
                grad=torch.empty(numel, dtype=grad_dtype),
                param=master.to(dtype).clone(),
                rounded=master if dtype == torch.float32 else torch.empty(numel, dtype=dtype),
            )
        )
    return states


def place(states: Sequence[UnitState], schedule: Schedule, device: Device[Any]) -> None:
    """Set the placements that ``schedule`` executes, and reserve memory on ``device`` for resident states.

    The schedule need not be a safe one.
    """
    placements = {frozenset(chain): placement for placement, chain in CHAINS.items()}
    for index, state in enumerate(states):
        kinds = frozenset(action.kind for action in schedule.actions if action.unit == index)
        state.placement = placements[kinds]
        is_resident = state.placement is Placement.RESIDENT
        state.resident = Resident(Slot.reserve(device, state.numel)) if is_resident else None


def gradients(numels: Sequence[int], step: int) -> list[torch.Tensor]:
    """Return random fp32 gradients, the same for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(numel, generator=generator) for numel in numels]


def fill_gradients(states: Sequence[UnitState], step: int) -> None:
    for state, gradient in zip(states, gradients([state.numel for state in states], step), strict=True):
        state.grad.copy_(gradient)


def update_serially(states: Sequence[UnitState], adam: AdamKernel, steps: Sequence[AdamStep]) -> None:
    """Update one unit after another in host memory, each a sub-group of its own, as stock DeepSpeed does.

    This is the reference.
    """
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


def assert_equal(found: Sequence[UnitState], expected: Sequence[UnitState]) -> None:
    for index, (ours, reference) in enumerate(zip(found, expected, strict=True)):
        for name in NAMES:
            assert torch.equal(getattr(ours, name), getattr(reference, name)), f"{name} of unit {index}"


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors are equal, bit for bit; NaN equals nothing."""
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
