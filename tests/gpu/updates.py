"""Execute schedules on a CUDA device, with shapes for which copies take most of the time, and the serial reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import AdamStep, ElementRange
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import Split, UnitState
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Workload
from tests.gpu.kernels import triton_adam
from tests.kernels.adam_steps import BETAS, machine_arithmetic, steps_of
from tests.runtime.random_states import NAMES, gradients, make_states, place, update_serially

GATHER_CYCLES = 20_000_000
"""Cycles of the GPU's clock, about ten milliseconds: longer than the host needs to issue an update."""


def random_plan(seed: int) -> UpdatePlan:
    """Return a random plan with copies of a few bytes to a few MB, for which the kernels are very short."""
    chosen = random.Random(seed)
    count = chosen.randint(1, 9)
    order = list(range(count))
    chosen.shuffle(order)
    return UpdatePlan(
        workload=Workload.from_numels([chosen.choice([1, 15, 4097, chosen.randint(1, 900_000)]) for _ in range(count)]),
        placements=tuple(chosen.choice(list(Placement)) for _ in range(count)),
        num_slots=chosen.randint(1, 4),
        order=tuple(order),
    )


def host_adam(num_threads: int = 4) -> FusedAdam:
    """Return the CPU kernel."""
    return FusedAdam(machine_arithmetic(), BETAS, adamw=True, num_threads=num_threads)


GradDtypes: TypeAlias = "torch.dtype | Sequence[torch.dtype]"
"""The dtype of all gradients, or one per unit: a gradient that a user has set is fp32, whatever the model's is."""


def dtypes_of(plan: UpdatePlan, grad_dtypes: GradDtypes) -> list[torch.dtype]:
    """Return the gradient dtype of each unit."""
    return [grad_dtypes] * len(plan.placements) if isinstance(grad_dtypes, torch.dtype) else list(grad_dtypes)


def cuda_states(
    device: CudaDevice, plan: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int
) -> list[UnitState]:
    """Return states in host memory, with memory on the device where units are resident.

    Gradients are in the memory where their unit is updated.
    """
    states = make_states(numels_of(plan), dtype, seed)
    place(states, plan.schedule, device)
    for state, grad_dtype in zip(states, dtypes_of(plan, grad_dtypes), strict=True):
        for name in STATES:
            setattr(state, name, device.empty_host(state.numel, torch.float32).copy_(getattr(state, name)))
        on_cpu = state.placement is Placement.CPU
        state.grad = (device.empty_host if on_cpu else device.empty)(state.numel, grad_dtype).fill_(torch.nan)
        state.param = device.empty(state.numel, dtype).copy_(state.param)
        state.rounded = state.master if dtype == torch.float32 else device.empty_host(state.numel, dtype)
    return states


def numels_of(plan: UpdatePlan) -> list[int]:
    """Return the number of parameters of each unit."""
    return [unit.numel for unit in plan.workload.units]


def steps_for(plan: UpdatePlan, count: int) -> list[list[AdamStep]]:
    """Return ``count`` Adam steps for all sub-groups, of which each is one unit."""
    return [[step] * len(plan.placements) for step in steps_of(count)]


def late_backward(states: Sequence[UnitState], step: int) -> None:
    """Issue writes of the step's gradients that take long to finish."""
    arrived = [
        gradient.to(state.grad.dtype).pin_memory().to("cuda", non_blocking=True)
        for state, gradient in zip(states, gradients([state.numel for state in states], step), strict=True)
    ]
    torch.cuda._sleep(GATHER_CYCLES)
    for state, gradient in zip(states, arrived, strict=True):
        state.grad.copy_(gradient, non_blocking=True)


def executed(
    plan: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int, count: int = 4
) -> list[torch.Tensor]:
    """Execute the plan, and return the parameters that each step's forward gathered and all states at the end.

    The gather runs on a stream of its own that waits for no other stream, as DeepSpeed's all-gathers do with
    ``overlap_comm``. Backward writes the gradients late. The tensors are in host memory.
    """
    device = CudaDevice(torch.cuda.current_device())
    states = cuda_states(device, plan, dtype, grad_dtypes, seed)
    kernel = triton_adam()
    kernel.compile({torch.float32, *dtypes_of(plan, grad_dtypes)}, [dtype])
    executor = Executor(plan.schedule, states, device, host_adam(), kernel)
    gather = torch.cuda.Stream()
    found: list[torch.Tensor] = []
    try:
        for number, steps in enumerate(steps_for(plan, count), start=1):
            with torch.cuda.stream(gather):
                gathered = [state.param.clone() for state in states]
            torch.cuda.current_stream().wait_stream(gather)
            late_backward(states, number)
            executor.run(steps)
            found.extend(gathered)
        executor.give_states_back()
        with torch.cuda.stream(gather):
            found.extend(getattr(state, name).clone() for state in states for name in NAMES)
        gather.synchronize()
    finally:
        executor.close()
    return [tensor.cpu() for tensor in found]


def deferred(
    plan: UpdatePlan,
    dtype: torch.dtype,
    grad_dtypes: GradDtypes,
    seed: int,
    count: int = 4,
    issuing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[torch.Tensor]:
    """Execute the plan with deferred updates, and return early ranges, gathered parameters and the final states.

    For each step, these are the parameters of the early ranges directly after the update has begun, and the parameters
    that the next forward gathers unit by unit while the update continues. Half of the steps are prefetched;
    in the other half ``advance`` issues all actions that it can. Calls that training makes during an update are made
    inside ``issuing``.
    """
    device = CudaDevice(torch.cuda.current_device())
    states = cuda_states(device, plan, dtype, grad_dtypes, seed)
    splits = early_ranges(plan, seed)
    kernel = triton_adam()
    kernel.compile({torch.float32, *dtypes_of(plan, grad_dtypes)}, [dtype])
    executor = Executor(plan.schedule, states, device, host_adam(), kernel, splits=splits)
    gather = torch.cuda.Stream()
    found: list[torch.Tensor] = []
    try:
        for number, steps in enumerate(steps_for(plan, count), start=1):
            if number % 2:
                with issuing():
                    executor.prefetch()
            late_backward(states, number)
            with issuing():
                executor.begin(steps)
                if number % 2 == 0:
                    executor.advance()
            found.extend(
                element_range.view(state.param).clone()
                for state, split in zip(states, splits, strict=True)
                for element_range in split.early
            )
            with torch.cuda.stream(gather), issuing():
                executor.publish_early_ranges()
                for index, state in enumerate(states):
                    executor.publish(index)
                    found.append(state.param.clone())
            torch.cuda.current_stream().wait_stream(gather)
            executor.finish()
            assert executor.failure is None, executor.failure
        executor.give_states_back()
        found.extend(getattr(state, name).clone() for state in states for name in NAMES)
        torch.cuda.synchronize()
    finally:
        executor.close()
    return [tensor.cpu() for tensor in found]


def early_ranges(plan: UpdatePlan, seed: int) -> list[Split]:
    """Return up to two early ranges per unit, with arbitrary borders."""
    chosen = random.Random(f"early ranges {seed}")
    splits = []
    for numel in numels_of(plan):
        borders = sorted(chosen.randint(0, numel) for _ in range(4))
        splits.append(Split.create(ElementRange.whole(numel), zip(borders[::2], borders[1::2], strict=True)))
    return splits


def serial_of_deferred(
    plan: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int, count: int = 4
) -> list[torch.Tensor]:
    """Return the tensors that ``deferred`` must return, from updates of one unit after another on the CPU."""
    states = make_states(numels_of(plan), dtype, seed)
    splits, adam = early_ranges(plan, seed), host_adam()
    found: list[torch.Tensor] = []
    for number, steps in enumerate(steps_for(plan, count), start=1):
        given = zip(gradients(numels_of(plan), number), dtypes_of(plan, grad_dtypes), strict=True)
        for state, (gradient, grad_dtype) in zip(states, given, strict=True):
            state.grad = gradient.to(grad_dtype)
        update_serially(states, adam, steps)
        for state, split in zip(states, splits, strict=True):
            found.extend(element_range.view(state.param).clone() for element_range in split.early)
        found.extend(state.param.clone() for state in states)
    found.extend(getattr(state, name) for state in states for name in NAMES)
    return found


def serial(
    plan: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int, count: int = 4
) -> list[torch.Tensor]:
    """Return the tensors that ``executed`` must return, from updates of one unit after another on the CPU."""
    states = make_states(numels_of(plan), dtype, seed)
    adam = host_adam()
    found: list[torch.Tensor] = []
    for number, steps in enumerate(steps_for(plan, count), start=1):
        found.extend(state.param.clone() for state in states)
        given = zip(gradients(numels_of(plan), number), dtypes_of(plan, grad_dtypes), strict=True)
        for state, (gradient, grad_dtype) in zip(states, given, strict=True):
            state.grad = gradient.to(grad_dtype)
        update_serially(states, adam, steps)
    found.extend(getattr(state, name) for state in states for name in NAMES)
    return found
