"""Check the GPU Adam of the device: the Triton kernel's launches, executed by the C++ kernel on a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels import triton_adam
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from tests.kernels.adam_steps import BETAS, GRADS, PARAMS, STEP, copied, differences, random_tensors, steps_of
from tests.software_gpu import device
from tests.software_gpu.adam_kernel import SoftwareAdamKernel
from tests.software_gpu.emulated_time import elapsed_ms, milliseconds
from tests.software_gpu.settings import MachineRates, changed

# The name of the device before it is loaded, since the process of pytest does not load it.
DEVICE = torch.device("privateuseone", 0)
NUMEL = 1003
"""Elements of a sub-group that ends in the middle of a vector."""


@contextmanager
def _triton_adam(arithmetic: Arithmetic, *, adamw: bool = True) -> Iterator[TritonAdam]:
    with mock.patch.object(triton_adam, "_import_kernel", return_value=(SoftwareAdamKernel(), {})):
        yield TritonAdam(arithmetic, BETAS, adamw=adamw, device=DEVICE)


def _on_device(tensors: AdamTensors) -> AdamTensors:
    return tensors.map(lambda tensor: tensor.to(DEVICE))


def _on_host(tensors: AdamTensors) -> AdamTensors:
    return tensors.map(torch.Tensor.cpu)


def updates_have_the_bits_of_the_fused_kernel() -> None:
    """Compare all pairs of dtypes over steps that are done in ranges, which cut vectors and the tail."""
    borders = [0, 1, 4, 334, 502, 1001, 1002, NUMEL]
    for place, (grad_dtype, param_dtype) in enumerate(product(GRADS, PARAMS)):
        arithmetic = Arithmetic((16, 8, 1)[place % 3], tuple(Tail)[place % len(Tail)])
        adamw = place % 2 == 0
        theirs, gradient = random_tensors(NUMEL, grad_dtype, param_dtype, seed=place)
        cpu = FusedAdam(arithmetic, BETAS, adamw=adamw, num_threads=1)
        with changed(lazy=adamw), _triton_adam(arithmetic, adamw=adamw) as gpu:
            ours = _on_device(copied(theirs))
            for step in steps_of(3, weight_decay=0.1):
                grad = gradient()
                theirs.grad.copy_(grad)
                ours.grad.copy_(grad)
                for kernel in (cpu, gpu):
                    kernel.begin_step([step])
                cpu.update(0, theirs)
                for begin, end in pairwise(borders if step.step > 1 else [0, NUMEL]):
                    element_range = ElementRange(begin=begin, end=end, sub_group_numel=NUMEL)
                    gpu.update(0, ours.narrow(element_range), element_range)
            assert differences(_on_host(ours), theirs) == [], (grad_dtype, param_dtype, arithmetic)


def a_range_leaves_all_other_elements_as_they_were() -> None:
    before, gradient = random_tensors(NUMEL, torch.float32, torch.bfloat16, seed=1)
    before.grad.copy_(gradient())
    tensors = _on_device(copied(before))
    element_range = ElementRange(begin=5, end=8, sub_group_numel=NUMEL)
    with _triton_adam(Arithmetic(1, Tail.UNFUSED)) as gpu:
        gpu.begin_step([STEP])
        gpu.update(0, tensors.narrow(element_range), element_range)
    after = _on_host(tensors)
    for name in ("master", "exp_avg", "exp_avg_sq", "param"):
        changed_elements = (getattr(after, name) != getattr(before, name)).nonzero().flatten().tolist()
        assert set(changed_elements) <= {5, 6, 7}, name
        assert name == "param" or changed_elements == [5, 6, 7], name


def an_update_is_executed_on_the_current_stream_and_does_not_wait() -> None:
    tensors, gradient = random_tensors(NUMEL, torch.float32, None, seed=2)
    tensors.grad.copy_(gradient())
    with changed(lazy=True, lazy_s=100.0), _triton_adam(Arithmetic(1, Tail.UNFUSED)) as gpu:
        ours = _on_device(tensors)
        before = ours.master.clone()
        side = device.Stream()
        device.synchronize()
        with device.recorded_host_waits() as waits, device.stream(side):
            gpu.begin_step([STEP])
            gpu.update(0, ours)
        assert waits == []
        assert torch.equal(ours.master, before)
        side.synchronize()
        assert not torch.equal(ours.master, before)


def compiling_launches_without_elements() -> None:
    with _triton_adam(Arithmetic(1, Tail.UNFUSED)) as gpu:
        gpu.compile([torch.float32, torch.bfloat16], [None, torch.bfloat16])
    device.synchronize()


def the_speed_of_the_emulated_machine_is_that_of_the_kernel() -> None:
    tensors, _ = random_tensors(NUMEL, torch.bfloat16, torch.bfloat16, seed=3)
    ours = _on_device(tensors)
    rates = MachineRates(adam_params_per_s=1e5)
    whole_ms = 1e3 * NUMEL / 1e5
    with _triton_adam(Arithmetic(1, Tail.UNFUSED)) as gpu:
        gpu.begin_step([STEP])
        assert elapsed_ms(lambda: gpu.update(0, ours), rates, execute_first=True) == milliseconds(whole_ms)


def tensors_that_the_kernel_would_access_wrongly_are_refused() -> None:
    tensors, _ = random_tensors(NUMEL, torch.float32, torch.bfloat16, seed=4)
    ours = _on_device(tensors)
    wrong: dict[str, Callable[[], AdamTensors]] = {
        "another device": lambda: replace(ours, grad=ours.grad.cpu()),
        "not contiguous": lambda: replace(ours, grad=torch.zeros(2 * NUMEL, device=DEVICE)[::2]),
        "another length": lambda: replace(ours, param=torch.zeros(NUMEL - 1, device=DEVICE)),
        "a state in another dtype": lambda: replace(ours, exp_avg=ours.exp_avg.bfloat16()),
        "a gradient in another dtype": lambda: replace(ours, grad=ours.grad.double()),
        "a state at another alignment": lambda: replace(ours, master=torch.zeros(NUMEL + 1, device=DEVICE)[1:]),
    }
    with _triton_adam(Arithmetic(1, Tail.UNFUSED)) as gpu:
        gpu.begin_step([STEP])
        gpu.update(0, ours)
        for make in wrong.values():
            tensors_refused = make()
            with pytest.raises(AssertionError):
                gpu.update(0, tensors_refused)
        # The launch begins at the last multiple of 16 bytes, which has to be in the same memory.
        element_range = ElementRange(begin=1, end=NUMEL, sub_group_numel=NUMEL)
        moved = ours.map(lambda tensor: tensor[1:].clone())
        with pytest.raises(AssertionError, match="has no elements before it"):
            gpu.update(0, moved, element_range)
