"""How fast is the GPU's update? The bandwidth of our Triton kernel is compared with a copy's on the same GPU.

The gradient is in bf16 in one comparison, in fp32 in another. p, m and v are read and written in fp32, and the
parameter is written in bf16. The copy is a ``tensor.copy_`` that moves as many bytes, half of them read and half of
them written. PyTorch's fused AdamW reads the gradient in fp32, and its parameters are rounded in a second pass, as a
16-bit model needs. The variants run one after the other in each repetition, in an order that alternates, and CUDA
events time them. After the first update, the bits are compared with the CPU kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.adam.adam_cpu import step_of
from benchmarks.harness.cores import usable_cores
from benchmarks.harness.rows import Row
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamTensors
from deep_opt_states.profiler.probes import KernelTimer

STATE_BYTES_PER_PARAM = 26
"""Traffic without the gradient: p, m and v are read and written in fp32, the parameter is written in bf16."""


def host_tensors(numel: int, grad_dtype: torch.dtype) -> AdamTensors:
    """Return a fresh state and a gradient in host memory, with the same values in every call."""
    generator = torch.Generator().manual_seed(0)
    return AdamTensors(
        master=torch.randn(numel, generator=generator),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        grad=torch.randn(numel, generator=generator).to(grad_dtype),
        param=torch.zeros(numel, dtype=torch.bfloat16),
    )


def on_gpu(tensors: AdamTensors) -> AdamTensors:
    """Return copies of all tensors on the current GPU."""
    return replace(tensors, **{name: tensor.cuda() for name, tensor in vars(tensors).items()})


def _torch_fused(like: AdamTensors) -> Callable[[], object]:
    """Return an update with PyTorch's fused AdamW of copies of the tensors ``like``."""
    param = torch.nn.Parameter(like.master.clone())
    param.grad = gradient = like.grad.float()
    rounded = torch.empty_like(param.data, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([param], betas=DEFAULT_BETAS, weight_decay=0.01, fused=True)

    def update() -> None:
        gradient.mul_(step_of(1).grad_scale)
        optimizer.step()
        rounded.copy_(param.data)

    return update


def compare(numel: int, grad_dtype: torch.dtype, repetitions: int) -> Iterator[Row]:
    """Yield the rates and bandwidths of ``numel`` parameters. The kernel's row is waived if it is unavailable."""
    from deep_opt_states.device.kernels.choice import cpu_adam, known_arithmetic
    from deep_opt_states.device.kernels.library import KernelUnavailable
    from deep_opt_states.device.kernels.triton_adam import TritonAdam

    on_host = host_tensors(numel, grad_dtype)
    ours = on_gpu(on_host)
    try:
        kernel = TritonAdam(known_arithmetic(), DEFAULT_BETAS, adamw=True, device=ours.master.device)
        kernel.compile([grad_dtype], [torch.bfloat16])
    except KernelUnavailable as unavailable:
        yield Row(variant="GPU, ours", quantity="update rate", waived=str(unavailable))
        return
    reference = cpu_adam(1, DEFAULT_BETAS, adamw=True, num_threads=usable_cores()).kernel
    for adam, tensors in ((kernel, ours), (reference, on_host)):
        adam.begin_step([step_of(1)])
        adam.update(0, tensors)
    same = all(torch.equal(getattr(ours, name).cpu(), expected) for name, expected in vars(on_host).items())
    del on_host

    bytes_per_param = STATE_BYTES_PER_PARAM + grad_dtype.itemsize
    source = torch.zeros(bytes_per_param * numel // 2, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)

    def update() -> None:
        kernel.update(0, ours)

    operations: dict[str, Callable[[], object]] = {
        "adam": update,
        "torch fused": _torch_fused(ours),
        "copy": lambda: destination.copy_(source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    timer = KernelTimer(CudaDevice(torch.cuda.current_device()))
    for repetition in range(3 + repetitions):
        kernel.begin_step([step_of(2 + repetition)])
        for name in list(operations) if repetition % 2 else reversed(operations):
            # Wait until the GPU is idle, so that nothing else is timed.
            torch.cuda.synchronize()
            elapsed_s = timer.seconds_of(operations[name])
            if repetition >= 3:  # the first repetitions warm up
                seconds[name].append(elapsed_s)
    bytes_per_s = {
        name: [bytes_per_param * numel / elapsed_s for elapsed_s in samples] for name, samples in seconds.items()
    }
    shares = [adam / copy for adam, copy in zip(bytes_per_s["adam"], bytes_per_s["copy"], strict=True)]
    setting = {"parameters": numel, "gradients": str(grad_dtype).removeprefix("torch.")}
    rates = [numel / elapsed_s for elapsed_s in seconds["adam"]]
    yield Row(variant="GPU, ours", quantity="update rate", unit="parameters/s", samples=rates, setting=setting)
    ours_row = partial(Row, variant="GPU, ours", setting=setting)
    yield ours_row(quantity="bandwidth", unit="bytes/s", samples=bytes_per_s["adam"])
    yield ours_row(quantity="share of a copy's bandwidth", unit="share", samples=shares)
    yield ours_row(quantity="bit-identical to the CPU kernel", value=same, claimed=True)
    fused_rates = [numel / elapsed_s for elapsed_s in seconds["torch fused"]]
    fused = partial(Row, variant="GPU, torch fused, then rounded", setting=setting)
    yield fused(quantity="update rate", unit="parameters/s", samples=fused_rates)
    yield Row(variant="GPU, a copy", quantity="bandwidth", unit="bytes/s", samples=bytes_per_s["copy"], setting=setting)
