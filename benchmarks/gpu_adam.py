"""How fast is the GPU's update? Our Triton kernel's bytes a second beside those of a copy on the same GPU, in one run.

The gradient is read in bf16, then in fp32; p, m and v are read and written in fp32, the parameter is written in bf16.
The copy is ``tensor.copy_`` that moves as many bytes, half of them read and half written. Arms take turns, in an order
that alternates, timed by CUDA events. The bits are compared with the CPU kernel's after the first update.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.record import record
from deep_opt_states import machine
from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors

STATE_BYTES_PER_PARAM = 26
"""p, m and v read and written in fp32, the parameter written in bf16; the gradient comes on top."""

TARGET = 0.85
"""Of the copy's bytes a second."""

BETAS = (0.9, 0.999)

LAUNCH_CYCLES = 2_000_000
"""About a millisecond of the GPU's clock."""


def step_of(number: int) -> AdamStep:
    return AdamStep(
        step=number,
        lr=1e-3 / number,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=1e-8,
        weight_decay=0.01,
        bias_correction=True,
        grad_scale=0.37,
    )


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


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the 20th and 80th percentile by nearest rank."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {"median": median(ordered), "p20": ordered[round(0.2 * last)], "p80": ordered[round(0.8 * last)]}


def seconds_of(work: Callable[[], object]) -> float:
    """On the GPU, which has nothing else to do."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    # Meanwhile all is launched, which takes the host longer for one arm than for the other.
    torch.cuda._sleep(LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def compare(numel: int, grad_dtype: torch.dtype, repetitions: int, block: Any) -> dict[str, Any]:
    """Raises ``SystemExit`` where there is no kernel, or its bits are not the CPU kernel's."""
    from deep_opt_states.device.kernels.choice import cpu_adam, known_arithmetic
    from deep_opt_states.device.kernels.library import KernelUnavailable
    from deep_opt_states.device.kernels.triton_adam import TritonAdam

    theirs = host_tensors(numel, grad_dtype)
    ours = on_gpu(theirs)
    try:
        kernel = TritonAdam(known_arithmetic(), BETAS, adamw=True, device=ours.master.device, block=block)
        kernel.compile([grad_dtype], [torch.bfloat16])
    except KernelUnavailable as unavailable:
        raise SystemExit(str(unavailable)) from None
    reference = cpu_adam(1, BETAS, adamw=True, num_threads=machine.cores().usable).kernel
    for adam, tensors in ((kernel, ours), (reference, theirs)):
        adam.begin_step([step_of(1)])
        adam.update(0, tensors)
    for name, expected in vars(theirs).items():
        if not torch.equal(getattr(ours, name).cpu(), expected):
            raise SystemExit(f"not the CPU kernel's bits: {name}")
    del theirs

    bytes_per_param = STATE_BYTES_PER_PARAM + grad_dtype.itemsize
    source = torch.zeros(bytes_per_param * numel // 2, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)

    def update() -> None:
        kernel.update(0, ours)

    arms: dict[str, Callable[[], object]] = {"adam": update, "copy": lambda: destination.copy_(source)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(3 + repetitions):
        kernel.begin_step([step_of(2 + repetition)])
        for name in list(arms) if repetition % 2 else reversed(arms):
            elapsed_s = seconds_of(arms[name])
            if repetition >= 3:  # the first ones warm up
                seconds[name].append(elapsed_s)
    bytes_per_s = {name: [bytes_per_param * numel / its for its in of_arm] for name, of_arm in seconds.items()}
    shares = [adam / copy for adam, copy in zip(bytes_per_s["adam"], bytes_per_s["copy"], strict=True)]
    return {
        "gpu": torch.cuda.get_device_name(),
        "numel": numel,
        "grad_dtype": str(grad_dtype).removeprefix("torch."),
        "block": vars(block),
        "repetitions": repetitions,
        "adam_s": spread(seconds["adam"]),
        "copy_s": spread(seconds["copy"]),
        "adam_bytes_per_s": spread(bytes_per_s["adam"]),
        "copy_bytes_per_s": spread(bytes_per_s["copy"]),
        "share_of_copy_bandwidth": spread(shares),
        "reaches_target": median(shares) >= TARGET,
        "same_bits": True,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_adam", description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=100_000_000, help="parameters (default: 100,000,000)")
    parser.add_argument("--repetitions", type=int, default=25, help="timed, of each arm (default: 25)")
    about = "elements x warps of a program; several are compared (default: the kernel's own)"
    parser.add_argument("--blocks", nargs="+", metavar="ELEMENTSxWARPS", help=about)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: run this on a machine with a GPU and a PyTorch that is built for it")
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    from deep_opt_states.device.kernels.triton_adam import Block

    blocks = [Block()]
    if options.blocks:
        pairs = (text.split("x") for text in options.blocks)
        blocks = [Block(elements=int(elements), warps=int(warps)) for elements, warps in pairs]
    for block in blocks:
        for grad_dtype in (torch.bfloat16, torch.float32):
            row = compare(options.numel, grad_dtype, options.repetitions, block)
            print(json.dumps(row))
            print(record("gpu_adam", ("torch", "triton", "deepspeed"), row))
            share, rate = row["share_of_copy_bandwidth"]["median"], row["adam_bytes_per_s"]["median"]
            print(f"{row['grad_dtype']} gradients: {rate / 1e9:,.0f} GB/s, {share:.1%} of a copy's", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
