"""Run the GPU kernel next to the CPU kernel, and execute schedules on a CUDA device next to the serial reference.

The shapes of the schedules are such that copies take most of the time. As a program, it is the one that
compute-sanitizer runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import UnitState
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Workload
from tests.kernels.adam_steps import (
    BETAS,
    copied,
    differences,
    machine_arithmetic,
    random_tensors,
    steps_of,
    with_infinities,
)
from tests.runtime.random_states import (
    cut,
    gradients,
    make_states,
    place,
    run_update,
    same,
    tensors_of,
    update_serially,
    with_persistent,
)


def on_gpu(tensors: AdamTensors) -> AdamTensors:
    """Return copies of the tensors on the GPU."""
    return tensors.map(lambda tensor: tensor.to("cuda", copy=True))


def on_cpu(tensors: AdamTensors) -> AdamTensors:
    """Return the tensors in host memory."""
    return tensors.map(torch.Tensor.cpu)


def triton_adam(*, adamw: bool = True, arithmetic: Arithmetic | None = None) -> TritonAdam:
    """Return the GPU kernel with this machine's arithmetic, or with another."""
    return TritonAdam(
        arithmetic or machine_arithmetic(), BETAS, adamw=adamw, device=torch.device("cuda", torch.cuda.current_device())
    )


def train_both(
    steps: Sequence[AdamStep],
    numel: int,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    *,
    adamw: bool = True,
    arithmetic: Arithmetic | None = None,
    seed: int = 0,
    infinities: bool = False,
    placed: Callable[[AdamTensors], AdamTensors] = on_gpu,
) -> list[str]:
    """Train with both kernels and return the differences after the first step with any.

    ``placed`` copies the tensors to the GPU.
    """
    arithmetic = arithmetic or machine_arithmetic()
    cpu_tensors, gradient = random_tensors(numel, grad_dtype, param_dtype, seed)
    gpu_tensors = placed(copied(cpu_tensors))
    gpu = triton_adam(adamw=adamw, arithmetic=arithmetic)
    cpu = FusedAdam(arithmetic, BETAS, adamw=adamw, num_threads=4)
    for step in steps:
        grad = with_infinities(gradient(), step.step) if infinities else gradient()
        cpu_tensors.grad.copy_(grad)
        gpu_tensors.grad.copy_(grad)
        for kernel, tensors in ((gpu, gpu_tensors), (cpu, cpu_tensors)):
            kernel.begin_step([step])
            kernel.update(0, tensors)
        if found := differences(on_cpu(gpu_tensors), cpu_tensors):
            return [f"step {step.step}", *found]
    return []


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
    device: CudaDevice, plan: UpdatePlan, units: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int
) -> tuple[list[UnitState], list[UnitState]]:
    """Return the sub-groups, which are the units of ``plan``, and the states of ``units``, which are views of them.

    The states are in host memory, with memory on the device where units are resident. Gradients are in the memory where
    their unit is updated.
    """
    whole = make_states(numels_of(plan), dtype, seed)
    for state in whole:
        (part,) = state.parts
        for name in STATES:
            setattr(part, name, device.empty_host(state.length, torch.float32).copy_(getattr(part, name)))
        part.param = device.empty(state.length, dtype).copy_(part.param)
        part.rounded = part.master if dtype == torch.float32 else device.empty_host(state.length, dtype)
    states = cut(whole, units.workload, device)
    place(states, units.schedule, device)
    of_sub_group = dtypes_of(plan, grad_dtypes)
    for state in states:
        reserve = device.empty_host if state.placement is Placement.CPU else device.empty
        for part in state.parts:
            part.grad = reserve(part.elements.numel, of_sub_group[part.sub_group]).fill_(torch.nan)
    return whole, states


def numels_of(plan: UpdatePlan) -> list[int]:
    """Return the number of parameters of each unit."""
    return [unit.numel for unit in plan.workload.units]


def steps_for(plan: UpdatePlan, count: int) -> list[list[AdamStep]]:
    """Return ``count`` Adam steps for all sub-groups, of which each is one unit."""
    return [[step] * len(plan.placements) for step in steps_of(count)]


def late_backward(plan: UpdatePlan, states: Sequence[UnitState], step: int) -> None:
    """Issue writes of the step's gradients that take long to finish. Units of ``plan`` are whole sub-groups."""
    arrived = [gradient.pin_memory().to("cuda", non_blocking=True) for gradient in gradients(numels_of(plan), step)]
    torch.cuda._sleep(GATHER_CYCLES)
    for state in states:
        for part in state.parts:
            part.grad.copy_(part.elements.view(arrived[part.sub_group]), non_blocking=True)


@contextmanager
def executing(
    plan: UpdatePlan, units: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int
) -> Iterator[tuple[Executor, list[UnitState], list[UnitState]]]:
    """Yield an executor of ``units``, the sub-groups, and the states of the units."""
    device = CudaDevice(torch.cuda.current_device())
    whole, states = cuda_states(device, plan, units, dtype, grad_dtypes, seed)
    kernel = triton_adam()
    kernel.compile({torch.float32, *dtypes_of(plan, grad_dtypes)}, [dtype])
    executor = Executor(units.schedule, states, device, host_adam(), kernel)
    try:
        yield executor, whole, states
    finally:
        executor.close()


def executed(
    plan: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int, count: int = 4
) -> list[torch.Tensor]:
    """Execute the plan, and return the parameters that each step's forward gathered and all states at the end.

    The gather runs on a stream of its own that waits for no other stream, as DeepSpeed's all-gathers do with
    ``overlap_comm``. Backward writes the gradients late. The tensors are in host memory.
    """
    gather = torch.cuda.Stream()
    found: list[torch.Tensor] = []
    with executing(plan, plan, dtype, grad_dtypes, seed) as (executor, _, states):
        for number, steps in enumerate(steps_for(plan, count), start=1):
            with torch.cuda.stream(gather):
                gathered = [param.clone() for param in tensors_of(states, ["param"])]
            torch.cuda.current_stream().wait_stream(gather)
            late_backward(plan, states, number)
            run_update(executor, steps)
            found.extend(gathered)
        executor.sync_states_to_host()
        with torch.cuda.stream(gather):
            found.extend(tensor.clone() for tensor in tensors_of(states))
        gather.synchronize()
    return [tensor.cpu() for tensor in found]


def deferred(
    plan: UpdatePlan,
    dtype: torch.dtype,
    grad_dtypes: GradDtypes,
    seed: int,
    count: int = 4,
    issuing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[torch.Tensor]:
    """Execute the plan with deferred updates, and return persistent and gathered parameters, and the final states.

    For each step, these are the persistent parameters directly after the update has started, and the parameters that
    the next forward gathers unit by unit while the update continues. Half of the steps are prefetched; in the other
    half ``advance`` issues all actions that it can. Calls that training makes during an update are made inside
    ``issuing``.
    """
    units = with_persistent(plan, persistent_ranges(plan, seed))
    gather = torch.cuda.Stream()
    found: list[torch.Tensor] = []
    with executing(plan, units, dtype, grad_dtypes, seed) as (executor, whole, states):
        for number, steps in enumerate(steps_for(plan, count), start=1):
            if number % 2:
                with issuing():
                    executor.prefetch()
            late_backward(plan, states, number)
            with issuing():
                executor.begin(steps)
                if number % 2 == 0:
                    executor.advance()
            if units.workload.persistent_unit is not None:
                with issuing():
                    executor.publish(0)
                found.extend(part.param.clone() for part in states[0].parts)
            with torch.cuda.stream(gather), issuing():
                for index, state in enumerate(states):
                    executor.publish(index)
                    found.extend(part.param.clone() for part in state.parts)
            torch.cuda.current_stream().wait_stream(gather)
            executor.end()
            assert executor.failure is None, executor.failure
        executor.sync_states_to_host()
        found.extend(tensor.clone() for tensor in tensors_of(whole))
        torch.cuda.synchronize()
    return [tensor.cpu() for tensor in found]


def persistent_ranges(plan: UpdatePlan, seed: int) -> list[list[tuple[int, int]]]:
    """Return up to two ranges of persistent parameters per unit, with arbitrary borders."""
    chosen = random.Random(f"persistent ranges {seed}")
    ranges = []
    for numel in numels_of(plan):
        borders = sorted(chosen.randint(0, numel) for _ in range(4))
        ranges.append(list(zip(borders[::2], borders[1::2], strict=True)))
    return ranges


def serial_of_deferred(
    plan: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int, count: int = 4
) -> list[torch.Tensor]:
    """Return the tensors that ``deferred`` must return, from updates of one unit after another on the CPU."""
    whole = make_states(numels_of(plan), dtype, seed)
    workload, adam = with_persistent(plan, persistent_ranges(plan, seed)).workload, host_adam()
    found: list[torch.Tensor] = []
    for number, steps in enumerate(steps_for(plan, count), start=1):
        _set_gradients(plan, whole, grad_dtypes, number)
        update_serially(whole, adam, steps)
        states = cut(whole, workload, HostDevice())
        if workload.persistent_unit is not None:
            found.extend(part.param.clone() for part in states[0].parts)
        found.extend(param.clone() for param in tensors_of(states, ["param"]))
    return [*found, *tensors_of(whole)]


def _set_gradients(plan: UpdatePlan, whole: Sequence[UnitState], grad_dtypes: GradDtypes, step: int) -> None:
    given = zip(gradients(numels_of(plan), step), dtypes_of(plan, grad_dtypes), strict=True)
    for state, (gradient, grad_dtype) in zip(whole, given, strict=True):
        state.parts[0].grad = gradient.to(grad_dtype)


def serial(
    plan: UpdatePlan, dtype: torch.dtype, grad_dtypes: GradDtypes, seed: int, count: int = 4
) -> list[torch.Tensor]:
    """Return the tensors that ``executed`` must return, from updates of one unit after another on the CPU."""
    states = make_states(numels_of(plan), dtype, seed)
    adam = host_adam()
    found: list[torch.Tensor] = []
    for number, steps in enumerate(steps_for(plan, count), start=1):
        found.extend(state.parts[0].param.clone() for state in states)
        _set_gradients(plan, states, grad_dtypes, number)
        update_serially(states, adam, steps)
    return [*found, *tensors_of(states)]


def main() -> None:
    """Run the kernel on odd lengths, and the executor on a plan with every placement, and check the bits."""
    for numel in (1, 17, 4099):
        assert train_both(steps_of(1), numel, torch.bfloat16, torch.bfloat16) == []
    plan = UpdatePlan(
        workload=Workload.from_numels([33, 5000, 4096, 17]), placements=(*Placement, Placement.STREAMED), num_slots=1
    )
    found = executed(plan, torch.bfloat16, torch.bfloat16, seed=0, count=2)
    assert same(found, serial(plan, torch.bfloat16, torch.bfloat16, seed=0, count=2))
    print("same bits")


if __name__ == "__main__":
    main()
