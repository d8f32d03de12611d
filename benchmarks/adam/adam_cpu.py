"""How fast is the CPU's update? Our single pass is compared with the three passes of stock's ``step()`` in one run.

Stock scales the fp32 gradient in place, calls DeepSpeedCPUAdam, and rounds the parameters to bf16. Ours reads the bf16
gradient and does the rest in the same pass. Both start from the same state, and the bits of p, m, v and the bf16
parameters are compared after every repetition. For comparison, fp32 memory is read and written in place, which shows
the bandwidth of host memory. The variants run one after the other in each repetition, in an order that alternates.

If both are limited by host memory, they differ by their bytes per parameter, 42 and 28, and by a little more, since
stock's rounding also reads the memory that it overwrites.
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
from benchmarks.harness.targets import MEMORY_SHARE
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamKernel, AdamStep
from deep_opt_states.device.kernels.choice import cpu_adam
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.runtime.state import UnitPart
from deep_opt_states.runtime.state_memory import StateMemory
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

BYTES_PER_PARAM = 28
"""Host memory traffic of our update: p, m and v are read and written in fp32, the gradient is read and the parameter
written in bf16."""


@dataclass(frozen=True, kw_only=True)
class AdamState:
    """The fp32 parameters and moments, and the bf16 parameters."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    param: torch.Tensor

    def differs_from(self, other: AdamState) -> list[str]:
        """Return the names of the tensors whose bits differ."""
        return [name for name, tensor in vars(self).items() if not torch.equal(tensor, getattr(other, name))]


def step_of(number: int) -> AdamStep:
    """Return the hyperparameters of step ``number``, which counts from 1."""
    return AdamStep(
        step=number,
        lr=1e-3 / number,
        beta1=DEFAULT_BETAS[0],
        beta2=DEFAULT_BETAS[1],
        eps=1e-8,
        weight_decay=0.01,
        bias_correction=True,
        grad_scale=0.37,
    )


def fresh_state(numel: int) -> AdamState:
    """Return a state as stock allocates it: PyTorch's allocator places each tensor separately."""
    generator = torch.Generator().manual_seed(0)
    return AdamState(
        master=torch.randn(numel, generator=generator),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        param=torch.zeros(numel, dtype=torch.bfloat16),
    )


def in_slab(state: AdamState, gradient: torch.Tensor, kernel: AdamKernel) -> UnitPart:
    """Return a copy of ``state`` as our training allocates it: in one slab, first touched by the kernel's threads."""
    numel = gradient.numel()
    plan = UpdatePlan(workload=Workload.from_numels([numel]), placements=(Placement.CPU,), num_slots=1)
    memory = StateMemory(plan.workload, [state.param], torch.bfloat16, HostDevice())
    memory.set_plan(plan)
    (tensors,), (unit,) = memory.sub_groups, memory.units
    kernel.zero(tensors.adam_tensors)
    (part,) = unit.parts
    part.master.copy_(state.master)
    part.grad.copy_(gradient)
    return part


class ThreePassUpdate:
    """An update in the three passes that DeepSpeed's ``stage3.py`` makes.

    They are those of ``unscale_and_clip_grads``, ``optimizer.step()`` and ``copy_``.
    """

    def __init__(
        self, state: AdamState, gradient: torch.Tensor, optimizer: Callable[..., torch.optim.Optimizer]
    ) -> None:
        self.state = state
        self._gradient = gradient
        self._master = torch.nn.Parameter(state.master)
        self._master.grad = torch.empty_like(state.master)
        self._optimizer = optimizer([self._master], betas=DEFAULT_BETAS, weight_decay=0.01)

    def prepare(self) -> None:
        """Restore the gradient. In training, backward does this on the accelerator and over PCIe: it is not timed."""
        assert self._master.grad is not None
        self._master.grad.copy_(self._gradient)

    def update(self, step: AdamStep) -> None:
        """Scale the gradient, update the fp32 parameters, and round them to bf16."""
        assert self._master.grad is not None
        self._optimizer.param_groups[0]["lr"] = step.lr
        self._master.grad.mul_(step.grad_scale)
        self._optimizer.step()
        self.state.param.copy_(self._master.data)


class StockUpdate(ThreePassUpdate):
    """The update of stock DeepSpeed, with DeepSpeedCPUAdam."""

    def __init__(self, state: AdamState, gradient: torch.Tensor) -> None:
        super().__init__(state, gradient, DeepSpeedCPUAdam)
        # The op updates these tensors, so that their bits can be compared with those of ours.
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        self._optimizer.state[self._master] = {"step": 0, **moments}


def fused_adam(threads: int) -> FusedAdam:
    """Return our CPU kernel. Raise ``SystemExit`` if it cannot be compiled."""
    choice = cpu_adam(1, DEFAULT_BETAS, adamw=True, num_threads=threads)
    if not isinstance(choice.kernel, FusedAdam):
        raise SystemExit(choice.why)
    return choice.kernel


class FusedUpdate:
    """Our update in a single pass."""

    def __init__(self, state: AdamState, gradient: torch.Tensor, threads: int) -> None:
        self._kernel = fused_adam(threads)
        self._tensors = tensors = in_slab(state, gradient, self._kernel).cpu_update().tensors
        assert tensors.param is not None
        self.state = AdamState(
            master=tensors.master, exp_avg=tensors.exp_avg, exp_avg_sq=tensors.exp_avg_sq, param=tensors.param
        )

    def prepare(self) -> None:
        """Do nothing: the update does not change the gradient."""

    def update(self, step: AdamStep) -> None:
        """Update all parameters with the fused kernel."""
        self._kernel.begin_step([step])
        self._kernel.update(0, self._tensors)


class TimedUpdate(Protocol):
    """An update whose time is measured."""

    def prepare(self) -> None:
        """Do the work that has to precede an update and is not timed."""

    def update(self, step: AdamStep) -> None:
        """Update all parameters once."""


class InPlaceScaling:
    """A multiplication in place of fp32 memory as large as p, m and v, which measures the memory's bandwidth."""

    def __init__(self, numel: int) -> None:
        self.memory = torch.ones(3 * numel)

    def prepare(self) -> None:
        """Do nothing."""

    def update(self, step: AdamStep) -> None:
        """Scale by 2 and by 0.5 in turn, so that the values stay finite."""
        self.memory.mul_(2.0 if step.step % 2 else 0.5)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let PyTorch use ``count`` threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(work: Callable[[AdamStep], None], step: AdamStep) -> float:
    """Return the seconds that ``work(step)`` takes."""
    start_s = time.perf_counter()
    work(step)
    return time.perf_counter() - start_s


def compare(numel: int, threads: int, repetitions: int) -> Iterator[Row]:
    """Yield the rates and bandwidths of ``numel`` parameters, with ``threads`` threads for all variants."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch_threads(threads):
        stock = StockUpdate(fresh_state(numel), gradient)
        ours = FusedUpdate(fresh_state(numel), gradient, threads)
        in_place = InPlaceScaling(numel)
        updates: dict[str, TimedUpdate] = {
            "stock": stock,
            "ours": ours,
            "torch fused": ThreePassUpdate(fresh_state(numel), gradient, partial(torch.optim.AdamW, fused=True)),
            "in place": in_place,
        }
        seconds: dict[str, list[float]] = {name: [] for name in updates}
        same = True
        for repetition in range(1 + repetitions):
            step = step_of(1 + repetition)
            for name in list(updates) if repetition % 2 else reversed(updates):
                updates[name].prepare()
                elapsed_s = seconds_of(updates[name].update, step)
                if repetition > 0:  # the first repetition warms up
                    seconds[name].append(elapsed_s)
            same = same and not ours.state.differs_from(stock.state)
    setting = {"parameters": numel, "threads": threads}
    speedups = [stock_s / ours_s for stock_s, ours_s in zip(seconds["stock"], seconds["ours"], strict=True)]
    in_place_bytes_per_s = [2 * in_place.memory.nbytes / elapsed_s for elapsed_s in seconds["in place"]]
    ours_bytes_per_s = [BYTES_PER_PARAM * numel / elapsed_s for elapsed_s in seconds["ours"]]
    shares = [reached / available for reached, available in zip(ours_bytes_per_s, in_place_bytes_per_s, strict=True)]
    for name in ("stock", "ours", "torch fused"):
        rates = [numel / elapsed_s for elapsed_s in seconds[name]]
        yield Row(variant=f"CPU, {name}", quantity="update rate", unit="parameters/s", samples=rates, setting=setting)
    ours_row, memory = partial(Row, variant="CPU, ours", setting=setting), "host memory, in place"
    yield ours_row(quantity="update speedup over stock", unit="times", samples=speedups)
    yield ours_row(quantity="bandwidth", unit="bytes/s", samples=ours_bytes_per_s)
    yield ours_row(quantity=MEMORY_SHARE, unit="share", samples=shares)
    yield ours_row(quantity="bit-identical to stock", value=same, claimed=True)
    yield Row(variant=memory, quantity="bandwidth", unit="bytes/s", samples=in_place_bytes_per_s, setting=setting)
