"""How fast is the GPU's update? Our Triton kernel's bytes a second beside those of a copy on the same GPU, in one run.

The gradient is read in bf16, then in fp32; p, m and v are read and written in fp32, the parameter is written in bf16.
The copy is ``tensor.copy_`` that moves as many bytes, half of them read and half written. PyTorch's fused AdamW has
the gradient in fp32, and what it updated is rounded in a second pass, as for a 16-bit model. Arms take turns, in an
order that alternates, timed by CUDA events. The bits are compared with the CPU kernel's after the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.harness.cpu_adam import BETAS, step_of
from benchmarks.harness.rows import Row
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import AdamTensors
from deep_opt_states.host import machine
from deep_opt_states.profiler.device_timer import DeviceTimer

STATE_BYTES_PER_PARAM = 26
"""p, m and v read and written in fp32, the parameter written in bf16; the gradient comes on top."""


def host_tensors(numel: int, grad_dtype: torch.dtype) -> AdamTensors:
    generator = torch.Generator().manual_seed(0)
    return AdamTensors(
        master=torch.randn(numel, generator=generator),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        grad=torch.randn(numel, generator=generator).to(grad_dtype),
        param=torch.zeros(numel, dtype=torch.bfloat16),
    )


def on_gpu(tensors: AdamTensors) -> AdamTensors:
    return replace(tensors, **{name: tensor.cuda() for name, tensor in vars(tensors).items()})


def _torch_fused(like: AdamTensors) -> Callable[[], object]:
    param = torch.nn.Parameter(like.master.clone())
    param.grad = gradient = like.grad.float()
    rounded = torch.empty_like(param.data, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([param], betas=BETAS, weight_decay=0.01, fused=True)

    def update() -> None:
        gradient.mul_(step_of(1).grad_scale)
        optimizer.step()
        rounded.copy_(param.data)

    return update


def compare(numel: int, grad_dtype: torch.dtype, repetitions: int) -> Iterator[Row]:
    from deep_opt_states.device.kernels.choice import cpu_adam, known_arithmetic
    from deep_opt_states.device.kernels.library import KernelUnavailable
    from deep_opt_states.device.kernels.triton_adam import TritonAdam

    theirs = host_tensors(numel, grad_dtype)
    ours = on_gpu(theirs)
    try:
        kernel = TritonAdam(known_arithmetic(), BETAS, adamw=True, device=ours.master.device)
        kernel.compile([grad_dtype], [torch.bfloat16])
    except KernelUnavailable as unavailable:
        yield Row(arm="GPU, ours", quantity="update rate", waived=str(unavailable))
        return
    reference = cpu_adam(1, BETAS, adamw=True, num_threads=machine.cores().usable).kernel
    for adam, tensors in ((kernel, ours), (reference, theirs)):
        adam.begin_step([step_of(1)])
        adam.update(0, tensors)
    same = all(torch.equal(getattr(ours, name).cpu(), expected) for name, expected in vars(theirs).items())
    del theirs

    bytes_per_param = STATE_BYTES_PER_PARAM + grad_dtype.itemsize
    source = torch.zeros(bytes_per_param * numel // 2, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)

    def update() -> None:
        kernel.update(0, ours)

    arms: dict[str, Callable[[], object]] = {
        "adam": update,
        "torch, fused": _torch_fused(ours),
        "copy": lambda: destination.copy_(source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    device = CudaDevice(torch.cuda.current_device())
    timer = DeviceTimer(device, device.current_stream())
    for repetition in range(3 + repetitions):
        kernel.begin_step([step_of(2 + repetition)])
        for name in list(arms) if repetition % 2 else reversed(arms):
            # The GPU has nothing else to do.
            torch.cuda.synchronize()
            elapsed_s = timer.seconds_of(arms[name])
            if repetition >= 3:  # the first ones warm up
                seconds[name].append(elapsed_s)
    bytes_per_s = {name: [bytes_per_param * numel / its for its in of_arm] for name, of_arm in seconds.items()}
    shares = [adam / copy for adam, copy in zip(bytes_per_s["adam"], bytes_per_s["copy"], strict=True)]
    about = {"parameters": numel, "gradients": str(grad_dtype).removeprefix("torch.")}
    rates = [numel / its for its in seconds["adam"]]
    yield Row(arm="GPU, ours", quantity="update rate", unit="parameters/s", samples=rates, setting=about)
    ours_row = partial(Row, arm="GPU, ours", setting=about)
    yield ours_row(quantity="bandwidth", unit="bytes/s", samples=bytes_per_s["adam"])
    yield ours_row(quantity="of a copy's bandwidth", unit="share", samples=shares)
    yield ours_row(quantity="the CPU kernel's bits", said=same, claimed=True)
    fused_rates = [numel / its for its in seconds["torch, fused"]]
    fused = partial(Row, arm="GPU, torch, fused, and rounded", setting=about)
    yield fused(quantity="update rate", unit="parameters/s", samples=fused_rates)
    yield Row(arm="GPU, a copy", quantity="bandwidth", unit="bytes/s", samples=bytes_per_s["copy"], setting=about)
