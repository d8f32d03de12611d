"""Test that the executor on CUDA streams gives the serial bits, also for units of more than 4 GiB, and page-locks."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange, UpdatedStates
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import UnitPart, UnitState
from deep_opt_states.zero.start.node_share import check_locking
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import STATES, Workload
from tests.gpu.parts import seconds_left
from tests.gpu.updates import is_right, random_model, triton_adam
from tests.kernels.adam_steps import fused
from tests.launch import REPOSITORY, environment
from tests.runtime.moving import Model, MovingIteration, random_iterations
from tests.runtime.plain_adam import adam_step
from tests.runtime.random_states import run_update


@pytest.mark.parametrize("seed", range(60))
def test_units_that_move_between_updates_give_the_serial_bits(seed: int) -> None:
    chance = random.Random(seed)
    model = random_model(chance)
    iterations = random_iterations(chance, model, 5, moves=seed % 4 > 0)
    assert is_right(model, iterations), f"{model}\n{iterations}"


def streamed(numels: list[int], num_slots: int) -> UpdatePlan:
    workload = Workload.from_numels(numels)
    return UpdatePlan(workload=workload, placements=place_all(workload, Placement.STREAMED), num_slots=num_slots)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_equal_units_streamed_repeatedly_through_few_slots_give_the_serial_bits(num_slots: int) -> None:
    """Check that no action starts too early: it would read the previous unit's numbers, of equal shape."""
    model = Model(numels=(700_001,) * 8, persistent=[], grad_dtype=torch.bfloat16)
    iterations = [MovingIteration(plan=streamed(list(model.numels), num_slots))] * 10
    for _ in range(3):
        assert is_right(model, iterations)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer in PATH")
def test_compute_sanitizer_finds_no_access_out_of_bounds() -> None:
    # PyTorch makes CUDA calls that may fail, so failed calls are not reported.
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    timeout_s = seconds_left()
    try:
        done = subprocess.run(
            [*sanitizer, sys.executable, "-m", "tests.gpu.updates"],
            cwd=REPOSITORY,
            # PyTorch's caching allocator would hide accesses out of bounds.
            env=environment(DS_ACCELERATOR="cuda", PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer did not finish in {timeout_s:.0f} s: this says nothing about the kernel")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "same bits" in done.stdout


NUMELS = (2**30 + 5, 4099)
ALIGNED_NUMEL = 64
HOST_BYTES = 16 * 2**30
GPU_BYTES = 48 * 2**30


@pytest.mark.skipif(psutil.virtual_memory().available < HOST_BYTES, reason=f"takes {HOST_BYTES / 1e9:.0f} GB of memory")
def test_a_unit_of_a_billion_parameters_is_streamed() -> None:
    """Check a unit of which each state, and so each copy, is larger than 4 GiB, against updates in place on the GPU."""
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < GPU_BYTES:
        pytest.skip(f"takes {GPU_BYTES / 1e9:.0f} GB of GPU memory, {free_bytes / 1e9:.0f} GB are free")
    device = CudaDevice(torch.cuda.current_device())
    plan = streamed(list(NUMELS), num_slots=1)
    reference = [random_on_gpu(numel, seed) for seed, numel in enumerate(NUMELS)]
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
            states=UpdatedStates(**on_host),
            grad=tensors.grad,
            param=param,
            rounded=param,  # no unit is updated on the CPU
        )
        states.append(UnitState(placement=Placement.STREAMED, parts=[part]))
    kernel, in_place = triton_adam(), triton_adam()
    kernel.compile([torch.bfloat16], [torch.bfloat16])
    executor = Executor(plan.schedule, states, device, fused(), kernel)
    try:
        for steps in ([adam_step(number)] * len(NUMELS) for number in (1, 2)):
            run_update(executor, steps)
            in_place.begin_step(steps)
            for index, tensors in enumerate(reference):
                in_place.update(index, tensors)
        torch.cuda.synchronize()
        for index, (state, tensors) in enumerate(zip(states, reference, strict=True)):
            for name in ("param", *STATES):
                part = state.parts[0]
                found = part.param if name == "param" else getattr(part.states, name)
                assert torch.equal(found.cuda(), getattr(tensors, name)), f"{name} of unit {index}"
    finally:
        executor.close()
        states.clear()
        on_host.clear()
        slab.close()


def random_on_gpu(numel: int, seed: int) -> AdamTensors:
    """Return random tensors for the reference. The kernel is bit-identical to the CPU kernel (test_kernel.py)."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel, generator=generator, device="cuda", dtype=dtype)

    param = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    states = {"master": drawn(), "exp_avg": drawn(), "exp_avg_sq": drawn().square_()}
    return AdamTensors(**states, grad=drawn(torch.bfloat16), param=param)


LIMIT_BYTES = 64 * 2**10
STATES_BYTES = 64 * 2**20


@pytest.fixture
def low_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def is_refused(device: CudaDevice) -> bool:
    states = device.host_slab(STATES_BYTES)
    try:
        states.lock()
    except HostMemoryError:
        return True
    finally:
        states.close()
    return False


@pytest.mark.usefixtures("low_limit")
def test_a_trial_slightly_above_the_limit_predicts_whether_the_states_can_be_page_locked() -> None:
    device = CudaDevice(0)
    # Repeat it, because the trial must release its memory.
    for _ in range(3):
        try:
            check_locking(STATES_BYTES, STATES_BYTES // 16, device, LIMIT_BYTES)
        except HostMemoryError:
            assert is_refused(device)
        else:
            assert not is_refused(device)
