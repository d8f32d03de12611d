"""Test that the GPU kernel has the CPU kernel's bits, which are stock's (``tests/kernels/test_fused.py``)."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from deep_opt_states.device.kernels.adam import AdamTensors
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import BlockShape, TritonAdam
from deep_opt_states.zero.step.norms import sums_in_order
from tests.gpu.updates import on_cpu, on_gpu, triton_adam
from tests.kernels.adam_steps import (
    BETAS,
    STEP,
    copied,
    differences,
    machine_arithmetic,
    random_tensors,
    rounded_upper_halves,
)
from tests.kernels.compared import WIDTHS, cases, compared


@pytest.mark.parametrize("seed", range(4))
def test_difficult_values_of_every_dtype_have_the_bits_of_the_cpu_kernel(seed: int) -> None:
    """Check every kind of range, with gradients and parameters that are aligned or not, by the seed."""
    for width, (tail, grad, param, adamw, states) in zip(cycle(WIDTHS), cases(), strict=False):
        assert compared(Arithmetic(width, tail), grad, param, adamw, states, seed=seed, device="cuda") == []


@pytest.mark.parametrize("arithmetic", [Arithmetic(width, tail) for width, tail in product((16, 8, 1), Tail)], ids=str)
def test_tails_of_every_length_and_arithmetic_have_the_bits_of_the_cpu_kernel(arithmetic: Arithmetic) -> None:
    """Check all arithmetics, also those that no compiler here uses for stock's tail, with and without whole blocks."""
    for numel in (*range(1, 33), *(4096 + tail for tail in range(16))):
        for adamw in (True, False):
            options = {"seed": 4 * numel, "numel": numel, "device": "cuda"}
            assert compared(arithmetic, torch.bfloat16, torch.bfloat16, adamw, **options) == []


def test_a_large_sub_group_has_the_bits_of_the_cpu_kernel() -> None:
    arithmetic = machine_arithmetic()
    assert compared(arithmetic, torch.bfloat16, torch.bfloat16, True, numel=1_000_003, device="cuda") == []


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16])
def test_rounding_equals_pytorch_for_every_upper_half(param_dtype: torch.dtype) -> None:
    plain, expected = rounded_upper_halves(param_dtype)
    tensors, kernel = on_gpu(plain), triton_adam()
    kernel.begin_step([replace(STEP, weight_decay=0.0)])  # the master does not change
    kernel.update(0, tensors)
    found = on_cpu(tensors)
    assert differences(found, replace(found, master=expected.master, param=expected.param)) == []


def update_both(gpu_tensors: AdamTensors, cpu_tensors: AdamTensors) -> None:
    cpu = FusedAdam(machine_arithmetic(), BETAS, adamw=True, num_threads=1)
    for kernel, tensors in ((triton_adam(), gpu_tensors), (cpu, cpu_tensors)):
        kernel.begin_step([STEP])
        kernel.update(0, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_every_16_bit_pattern_have_the_bits_of_the_cpu_kernel(dtype: torch.dtype) -> None:
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)
    states = {name: torch.zeros(len(grad)) for name in ("master", "exp_avg", "exp_avg_sq")}
    cpu_tensors = AdamTensors(**states, grad=grad, param=None)
    gpu_tensors = on_gpu(cpu_tensors)
    update_both(gpu_tensors, cpu_tensors)
    assert differences(on_cpu(gpu_tensors), cpu_tensors) == []


def test_a_compiled_kernel_neither_compiles_nor_allocates_nor_blocks_the_host() -> None:
    import triton

    compiled: list[object] = []
    before = triton.knobs.runtime.jit_cache_hook

    def note(*args: object, **kwargs: object) -> bool:
        compiled.append(kwargs)
        return False

    triton.knobs.runtime.jit_cache_hook = note
    try:
        kernel = triton_adam(arithmetic=Arithmetic(8, Tail.UNFUSED))
        kernel.compile([torch.bfloat16], [torch.float16])
        at_start = len(compiled)
        for numel in (1, 2, 16, 4096, 100_003):
            plain, gradient = random_tensors(numel + 1, torch.bfloat16, torch.float16, seed=numel)
            plain.grad.copy_(gradient())
            tensors = on_gpu(plain)
            assert tensors.param is not None
            for begin in (0, 1):
                states = {name: getattr(tensors, name)[:numel] for name in ("master", "exp_avg", "exp_avg_sq")}
                grad, param = (tensor[begin : numel + begin] for tensor in (tensors.grad, tensors.param))
                part = AdamTensors(**states, grad=grad, param=param)
                for weight_decay in (0.0, 0.1):
                    torch.cuda.synchronize()
                    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
                    torch.cuda._sleep(50_000_000)
                    kernel.begin_step([replace(STEP, weight_decay=weight_decay)])
                    kernel.update(0, part)
                    assert not torch.cuda.current_stream().query(), "the host waited for the kernel"
                    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        assert len(compiled) == at_start
        other = TritonAdam(
            machine_arithmetic(),
            BETAS,
            adamw=True,
            device=torch.device("cuda", 0),
            block=BlockShape(elements=256, warps=2),
        )
        other.compile([torch.float16], [None])
        assert len(compiled) > at_start, "the hook is called for a compilation"
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def test_the_kernel_runs_on_the_current_stream() -> None:
    plain, gradient = random_tensors(100_003, torch.float32, torch.bfloat16, seed=1)
    plain.grad.copy_(gradient())
    gpu_tensors, stream = on_gpu(plain), torch.cuda.Stream()
    kernel = triton_adam()
    kernel.compile([torch.float32], [torch.bfloat16])
    kernel.begin_step([STEP])
    before = gpu_tensors.master.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        kernel.update(0, gpu_tensors)
    early = gpu_tensors.master.clone()  # on the default stream, while the other stream sleeps
    torch.cuda.current_stream().synchronize()
    assert not stream.query(), "the other stream slept too little for this test"
    stream.synchronize()
    assert torch.equal(early, before)
    assert not torch.equal(gpu_tensors.master, before)


def test_more_elements_than_an_int32_counts_have_the_bits_of_the_cpu_kernel() -> None:
    numel = 2**31 + 5
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < 18 * numel:
        pytest.skip(f"takes {18 * numel / 1e9:.0f} GB of GPU memory, {free_bytes / 1e9:.0f} GB are free")
    part = 4096 + numel % 16  # whole vectors and the same tail
    small, gradient = random_tensors(part, torch.bfloat16, torch.bfloat16, seed=2)
    small.grad.copy_(gradient())

    def large(tensor: torch.Tensor) -> torch.Tensor:
        longer = torch.zeros(numel, dtype=tensor.dtype, device="cuda")
        longer[-part:].copy_(tensor)
        return longer

    gpu_tensors = replace(small, **{name: large(tensor) for name, tensor in vars(small).items()})
    cpu_tensors = copied(small)
    update_both(gpu_tensors, cpu_tensors)
    found = replace(gpu_tensors, **{name: tensor[-part:].cpu() for name, tensor in vars(gpu_tensors).items()})
    assert differences(found, cpu_tensors) == []
    assert not bool(gpu_tensors.master[:-part].any()), "zeros stay zeros"


def test_the_sums_of_norms_have_the_bits_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, dtype=torch.float64, generator=generator).exp() ** 2
    offsets = torch.tensor([0, 3000, 3000, 3001, 5000])
    expected = sums_in_order(values, offsets)
    values, offsets = values.cuda(), offsets.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sums_in_order(values, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), expected)
