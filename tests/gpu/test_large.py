"""Test a unit of more than 10^9 parameters: each of its states is larger than 4 GiB, and so is each copy."""

from __future__ import annotations

import psutil
import pytest
import torch

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import UnitPart, UnitState
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import STATES, Workload
from tests.gpu.figures import figure
from tests.gpu.kernels import triton_adam
from tests.gpu.updates import host_adam, steps_for
from tests.model.costs import makespan_s
from tests.runtime.whole_update import run_update

NUMELS = (2**30 + 5, 4099)
ALIGNED_NUMEL = 64

HOST_BYTES = 16 * 2**30
GPU_BYTES = 48 * 2**30


@pytest.mark.skipif(psutil.virtual_memory().available < HOST_BYTES, reason=f"takes {HOST_BYTES / 1e9:.0f} GB of memory")
def test_a_unit_of_a_billion_parameters_is_streamed() -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < GPU_BYTES:
        pytest.skip(f"takes {GPU_BYTES / 1e9:.0f} GB of GPU memory, {free_bytes / 1e9:.0f} GB are free")
    device = CudaDevice(torch.cuda.current_device())
    workload = Workload.from_numels(list(NUMELS))
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.STREAMED), num_slots=1)
    reference = [on_gpu(numel, seed) for seed, numel in enumerate(NUMELS)]
    sizes = [-(-numel // ALIGNED_NUMEL) * ALIGNED_NUMEL for numel in NUMELS]
    slab = device.host_slab(len(STATES) * 4 * sum(sizes))
    slab.lock()
    states: list[UnitState] = []
    begin = 0
    for tensors, size in zip(reference, sizes, strict=True):
        on_host = {}
        for name in STATES:
            on_host[name] = slab.tensor(4 * begin, tensors.master.numel(), torch.float32)
            on_host[name].copy_(getattr(tensors, name))
            begin += size
        assert tensors.param is not None
        param = tensors.param.clone()
        part = UnitPart(
            sub_group=len(states),
            elements=ElementRange.whole(param.numel()),
            offset=0,
            master=on_host["master"],
            exp_avg=on_host["exp_avg"],
            exp_avg_sq=on_host["exp_avg_sq"],
            grad=tensors.grad,
            param=param,
            rounded=param,  # no unit is updated on the CPU
        )
        states.append(UnitState(placement=Placement.STREAMED, parts=[part]))
    kernel, in_place = triton_adam(), triton_adam()
    kernel.compile([torch.bfloat16], [torch.bfloat16])
    executor = Executor(plan.schedule, states, device, host_adam(), kernel)
    try:
        for steps in steps_for(plan, 2):
            run_update(executor, steps)
            in_place.begin_step(steps)
            for index, tensors in enumerate(reference):
                in_place.update(index, tensors)
        timeline = executor.timeline_reader()()
        figure("update of a billion parameters, streamed through one slot", makespan_s(timeline), "s")
        torch.cuda.synchronize()
        for index, (state, tensors) in enumerate(zip(states, reference, strict=True)):
            assert tensors.param is not None
            assert torch.equal(state.parts[0].param, tensors.param), f"param of unit {index}"
            for name in STATES:
                on_host = getattr(state.parts[0], name)
                assert torch.equal(on_host.cuda(), getattr(tensors, name)), f"{name} of unit {index}"
    finally:
        executor.close()
        states.clear()
        on_host.clear()
        slab.close()


def on_gpu(numel: int, seed: int) -> AdamTensors:
    """Return random tensors for the reference, which the kernel updates in place.

    The bits of the kernel are those of the CPU kernel (test_kernel.py).
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel, generator=generator, device="cuda", dtype=dtype)

    return AdamTensors(
        master=random(),
        exp_avg=random(),
        exp_avg_sq=random().square_(),
        grad=random(torch.bfloat16),
        param=torch.zeros(numel, dtype=torch.bfloat16, device="cuda"),
    )
