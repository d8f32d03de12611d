"""How fast is the CPU's update? Our single pass is compared with the three passes of stock's ``step()``.

Stock scales the fp32 gradient in place, calls DeepSpeedCPUAdam, and rounds the parameters to bf16. Ours reads the bf16
gradient and does the rest in the same pass, also with bf16 masters and with bf16 states. Stock and ours with fp32
states start from the same state, and their bits are compared after every repetition. For comparison, fp32 memory is
read and written in place, which shows the bandwidth of host memory. The variants run one after the other in each
repetition, with and without clipping, in an order that alternates.

An update that is limited by host memory takes as long as it moves bytes: 42 per parameter with stock; 28 with ours, 22
with bf16 masters and 14 with bf16 states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from benchmarks.harness.rows import BF16_SPEEDUP, BIT_IDENTICAL, MEMORY_SHARE, UPDATE_SPEEDUP, Row
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, STATE_DTYPES, AdamStep, StateDtypes
from deep_opt_states.device.kernels.choice import cpu_adam
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.runtime.state_memory import StateMemory
from perf_model.prediction.cost import traffic_by_action
from perf_model.schedule.action import ActionKind
from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

FACTORS = {"no clipping": 1.0, "clipped": 0.37}
"""The factor of the gradients by its name."""


def step_of(number: int, grad_scale: float = FACTORS["clipped"]) -> AdamStep:
    """Return the hyperparameters of step ``number``, which counts from 1."""
    return AdamStep(
        step=number,
        lr=1e-3 / number,
        beta1=DEFAULT_BETAS[0],
        beta2=DEFAULT_BETAS[1],
        eps=1e-8,
        weight_decay=0.01,
        bias_correction=True,
        grad_scale=grad_scale,
    )


class TimedUpdate(Protocol):
    """An update whose time is measured."""

    def prepare(self) -> None:
        """Do the work that has to precede an update and is not timed."""

    def update(self, step: AdamStep) -> None:
        """Update all parameters once."""


class ThreePassUpdate:
    """An update in the three passes that DeepSpeed's ``stage3.py`` makes, in memory of PyTorch's allocator.

    The passes are ``unscale_and_clip_grads``, ``optimizer.step()`` and ``copy_``.
    """

    def __init__(
        self, master: torch.Tensor, gradient: torch.Tensor, optimizer: Callable[..., torch.optim.Optimizer]
    ) -> None:
        self._gradient = gradient
        self._master = torch.nn.Parameter(master.clone())
        self._master.grad = torch.empty_like(master)
        self._param = torch.zeros_like(master, dtype=torch.bfloat16)
        self._optimizer = optimizer([self._master], betas=DEFAULT_BETAS, weight_decay=0.01)

    @property
    def states(self) -> list[torch.Tensor]:
        """Return p, m, v and the bf16 parameter."""
        state = self._optimizer.state[self._master]
        return [self._master.data, state["exp_avg"], state["exp_avg_sq"], self._param]

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
        self._param.copy_(self._master.data)


class FusedUpdate:
    """Our update in a single pass, of states with ``dtypes`` in one slab that the kernel's threads touch first."""

    def __init__(self, master: torch.Tensor, gradient: torch.Tensor, threads: int, dtypes: StateDtypes) -> None:
        choice = cpu_adam(1, DEFAULT_BETAS, adamw=True, num_threads=threads, dtypes=dtypes)
        assert isinstance(choice.kernel, FusedAdam), choice.why
        self._kernel = choice.kernel
        plan = UpdatePlan(workload=Workload.from_numels([master.numel()]), placements=(Placement.CPU,), num_slots=1)
        params = [torch.zeros_like(master, dtype=torch.bfloat16)]
        memory = self._memory = StateMemory(plan.workload, params, torch.bfloat16, HostDevice(), dtypes)
        memory.set_plan(plan)
        self._kernel.zero(memory.sub_groups[0])
        (part,) = memory.parts
        part.states.master.copy_(master)
        part.grad.copy_(gradient)
        self._tensors = part.cpu_update(part.states).tensors
        # As where a GPU trains: bf16 masters are published themselves, and fp32 ones are rounded to other memory.
        if dtypes.master == params[0].dtype:
            self._tensors = replace(self._tensors, param=None)

    @property
    def states(self) -> list[torch.Tensor]:
        """Return p, m, v and the bf16 parameter, which must not be the master itself."""
        assert self._tensors.param is not None
        return [self._tensors.master, self._tensors.exp_avg, self._tensors.exp_avg_sq, self._tensors.param]

    def prepare(self) -> None:
        """Do nothing: the update does not change the gradient."""

    def update(self, step: AdamStep) -> None:
        """Update all parameters with the fused kernel."""
        self._kernel.begin_step([step])
        self._kernel.update(0, self._tensors)


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


def compare(numel: int, threads: int, repetitions: int) -> Iterator[Row]:
    """Yield the rates and bandwidths of ``numel`` parameters, with ``threads`` threads for all variants."""
    generator = torch.Generator().manual_seed(0)
    master, gradient = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator).bfloat16()
    dtypes = dict(zip(WIDTHS_OF_STATES, STATE_DTYPES, strict=True))
    with torch_threads(threads):
        stock = ThreePassUpdate(master, gradient, DeepSpeedCPUAdam)
        ours = {states: FusedUpdate(master, gradient, threads, dtypes[states]) for states in dtypes}
        in_place = InPlaceScaling(numel)
        updates: dict[str, TimedUpdate] = {
            "stock": stock,
            **ours,
            "torch fused": ThreePassUpdate(master, gradient, partial(torch.optim.AdamW, fused=True)),
            "in place": in_place,
        }
        arms = [(name, clipping) for name in updates for clipping in FACTORS]
        seconds: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms}
        count, same = dict.fromkeys(updates, 0), True
        for repetition in range(1 + repetitions):
            for name, clipping in arms if repetition % 2 else reversed(arms):
                count[name] += 1
                step = step_of(count[name], FACTORS[clipping])
                updates[name].prepare()
                start_s = time.perf_counter()
                updates[name].update(step)
                elapsed_s = time.perf_counter() - start_s
                if repetition > 0:  # the first repetition warms up
                    seconds[name, clipping].append(elapsed_s)
            pairs = zip(ours["fp32"].states, stock.states, strict=True)
            same = same and all(torch.equal(tensor, expected) for tensor, expected in pairs)
    for clipping in FACTORS:
        setting = {"parameters": numel, "threads": threads, "gradients": clipping}
        rates = {name: [numel / elapsed_s for elapsed_s in seconds[name, clipping]] for name in updates}
        # In place, three fp32 numbers per parameter are read and written.
        available = [2 * in_place.memory.nbytes / numel * rate for rate in rates.pop("in place")]
        memory = partial(Row, variant="host memory, in place", setting=setting)
        yield memory(quantity="bandwidth", unit="bytes/s", samples=available)
        for name, of_name in rates.items():
            variant = f"CPU, ours, states {name}" if name in ours else f"CPU, {name}"
            row = partial(Row, variant=variant, setting=setting)
            yield row(quantity="update rate", unit="parameters/s", samples=of_name)
            if name in ours:
                for quantity, base in ((UPDATE_SPEEDUP, "stock"), (BF16_SPEEDUP, "fp32")):
                    ratios = [rate / of_base for rate, of_base in zip(of_name, rates[base], strict=True)]
                    yield row(quantity=quantity, unit="times", samples=ratios)
                moved = traffic_by_action(WIDTHS_OF_STATES[name])[ActionKind.CPU_STEP].dram
                shares = [moved * rate / bandwidth for rate, bandwidth in zip(of_name, available, strict=True)]
                yield row(quantity=MEMORY_SHARE, unit="share", samples=shares)
    setting = {"parameters": numel, "threads": threads}
    yield Row(variant="CPU, ours, states fp32", quantity=BIT_IDENTICAL, value=same, claimed=True, setting=setting)
