"""How fast is the CPU's update? Our one pass against what stock DeepSpeed's ``step()`` does, side by side in one run.

Stock: the fp32 gradient scaled in place, DeepSpeedCPUAdam, the parameters rounded to bf16. Ours: the bf16 gradient read
and the rest done in the same pass. Both start from the same state, and the bits of p, m, v and the bf16 parameters are
compared after every repetition. Beside them, what host memory gives to reading and writing in place. Arms take turns,
in an order that alternates.

Where both are at the limit of host memory they differ by their bytes, 42 against 28, and a little more since stock's
rounding also fetches what it overwrites.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from benchmarks.harness.rows import Row
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.device.kernels.choice import cpu_adam
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.runtime.state_memory import StateMemory
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

BETAS = (0.9, 0.999)

BYTES_PER_PARAM = 28
"""p, m and v read and written in fp32, the gradient read and the parameter written in bf16."""


@dataclass(frozen=True, kw_only=True)
class State:
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    param: torch.Tensor

    def differs_from(self, other: State) -> list[str]:
        return [name for name, ours in vars(self).items() if not torch.equal(ours, getattr(other, name))]


def step_of(number: int) -> AdamStep:
    """From 1."""
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


def fresh_state(numel: int) -> State:
    """As stock has it: each tensor by itself, where PyTorch's allocator puts it."""
    generator = torch.Generator().manual_seed(0)
    return State(
        master=torch.randn(numel, generator=generator),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        param=torch.zeros(numel, dtype=torch.bfloat16),
    )


def in_slab(state: State, gradient: torch.Tensor, kernel: AdamKernel) -> AdamTensors:
    """As training has it: side by side in one slab, first touched by the threads of ``kernel``."""
    numel = gradient.numel()
    plan = UpdatePlan(workload=Workload.of([numel]), placements=(Placement.CPU,), num_slots=1)
    memory = StateMemory.reserve(plan, [state.param], torch.bfloat16, HostDevice())
    (ours,) = memory.states
    assert ours.rounded is not None
    kernel.zero(ours.in_slab)
    ours.master.copy_(state.master)
    ours.grad.copy_(gradient)
    return AdamTensors(
        master=ours.master, exp_avg=ours.exp_avg, exp_avg_sq=ours.exp_avg_sq, grad=ours.grad, param=ours.rounded
    )


class ThreePasses:
    """``unscale_and_clip_grads``, ``optimizer.step()`` and ``copy_``, as ``stage3.py`` calls them."""

    def __init__(self, state: State, gradient: torch.Tensor, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.state = state
        self._gradient = gradient
        self._master = torch.nn.Parameter(state.master)
        self._master.grad = torch.empty_like(state.master)
        self._optimizer = optimizer([self._master], betas=BETAS, weight_decay=0.01)

    def prepare(self) -> None:
        """In training backward has done this, on the accelerator and over PCIe: it is not counted."""
        assert self._master.grad is not None
        self._master.grad.copy_(self._gradient)

    def update(self, step: AdamStep) -> None:
        assert self._master.grad is not None
        self._optimizer.param_groups[0]["lr"] = step.lr
        self._master.grad.mul_(step.grad_scale)
        self._optimizer.step()
        self.state.param.copy_(self._master.data)


class Stock(ThreePasses):
    def __init__(self, state: State, gradient: torch.Tensor) -> None:
        super().__init__(state, gradient, DeepSpeedCPUAdam)
        # Compared with ours at the end.
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        self._optimizer.state[self._master] = {"step": 0, **moments}


class Ours:
    def __init__(self, state: State, gradient: torch.Tensor, threads: int) -> None:
        choice = cpu_adam(1, BETAS, adamw=True, num_threads=threads)
        if not isinstance(choice.kernel, FusedAdam):
            raise SystemExit(choice.why)
        self._kernel = choice.kernel
        self._tensors = tensors = in_slab(state, gradient, choice.kernel)
        assert tensors.param is not None
        self.state = State(
            master=tensors.master, exp_avg=tensors.exp_avg, exp_avg_sq=tensors.exp_avg_sq, param=tensors.param
        )

    def prepare(self) -> None:
        pass

    def update(self, step: AdamStep) -> None:
        self._kernel.begin_step([step])
        self._kernel.update(0, self._tensors)


class Arm(Protocol):
    def prepare(self) -> None:
        """What is not timed."""

    def update(self, step: AdamStep) -> None:
        """One update of all parameters."""


class InPlace:
    """fp32 memory as large as p, m and v, multiplied in place."""

    def __init__(self, numel: int) -> None:
        self.memory = torch.ones(3 * numel)

    def prepare(self) -> None:
        pass

    def update(self, step: AdamStep) -> None:
        self.memory.mul_(2.0 if step.step % 2 else 0.5)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(work: Callable[[AdamStep], None], step: AdamStep) -> float:
    start_s = time.perf_counter()
    work(step)
    return time.perf_counter() - start_s


def compare(numel: int, threads: int, repetitions: int) -> Iterator[Row]:
    """With so many threads for all arms."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch_threads(threads):
        stock, ours = Stock(fresh_state(numel), gradient), Ours(fresh_state(numel), gradient, threads)
        in_place = InPlace(numel)
        adams = ("stock", "ours")
        arms: dict[str, Arm] = {
            "stock": stock,
            "ours": ours,
            "torch, fused": ThreePasses(fresh_state(numel), gradient, partial(torch.optim.AdamW, fused=True)),
            "in place": in_place,
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        same = True
        for repetition in range(1 + repetitions):
            step = step_of(1 + repetition)
            for name in list(arms) if repetition % 2 else reversed(arms):
                arms[name].prepare()
                elapsed_s = seconds_of(arms[name].update, step)
                if repetition > 0:  # the first warms up
                    seconds[name].append(elapsed_s)
            same = same and not ours.state.differs_from(stock.state)
    about = {"parameters": numel, "threads": threads}
    speedups = [theirs / its for theirs, its in zip(seconds["stock"], seconds["ours"], strict=True)]
    in_place_bytes_per_s = [2 * in_place.memory.nbytes / its for its in seconds["in place"]]
    ours_bytes_per_s = [BYTES_PER_PARAM * numel / its for its in seconds["ours"]]
    shares = [ours / its for ours, its in zip(ours_bytes_per_s, in_place_bytes_per_s, strict=True)]
    for name in (*adams, "torch, fused"):
        rates = [numel / its for its in seconds[name]]
        yield Row(arm=f"CPU, {name}", quantity="update rate", unit="parameters/s", samples=rates, setting=about)
    ours_row, memory = partial(Row, arm="CPU, ours", setting=about), "host memory, in place"
    yield ours_row(quantity="updates faster than stock", unit="times", samples=speedups)
    yield ours_row(quantity="bandwidth", unit="bytes/s", samples=ours_bytes_per_s)
    yield ours_row(quantity="of the bandwidth in place", unit="share", samples=shares)
    yield ours_row(quantity="stock's bits", said=same, claimed=True)
    yield Row(arm=memory, quantity="bandwidth", unit="bytes/s", samples=in_place_bytes_per_s, setting=about)
