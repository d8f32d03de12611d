"""Train through the memory and the executor of a rank, with anything that may happen between and during updates.

The reference is the same training with serial updates of whole sub-groups.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.lanes import Waiter
from deep_opt_states.runtime.state_memory import StateMemory
from perf_model.prediction.memory import TrainingSetup
from perf_model.schedule.cutting import BORDER_MULTIPLE
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Range, Unit, Workload
from tests.kernels.adam_steps import BETAS, fused, machine_arithmetic
from tests.runtime.plain_adam import adam_step
from tests.runtime.random_states import gradients, random_states, with_persistent

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WRITTEN = 0.5
"""The factor by which the caller multiplies master weights, and the value that it writes to persistent parameters."""


@dataclass(kw_only=True)
class Model:
    numels: tuple[int, ...]
    persistent: list[list[tuple[int, int]]]
    dtype: torch.dtype = torch.bfloat16
    grad_dtype: torch.dtype = torch.float32
    params_on_host: bool = False

    def gradients(self, number: int) -> list[torch.Tensor]:
        return [gradient.to(self.grad_dtype) for gradient in gradients(self.numels, number)]


@dataclass(kw_only=True)
class MovingIteration:
    """One iteration: first the plan may change, and then the caller may use the states in host memory."""

    plan: UpdatePlan
    writes_states: bool = False
    prefetches: bool = False
    is_skipped: bool = False
    speculation: int = 0
    """The seed of the steps that are speculated: of the right step or of another one, and perhaps discarded."""
    forward: list[int] = field(default_factory=list)
    """The units that a forward gathers on a separate stream while the update runs, modulo their number."""
    advances: bool = True
    writes_params: bool = False
    overlaps_flushes: bool = False
    """Whether the update ends on the caller's stream only, with flushes in flight."""


class MovingTraining:
    """A training run through memory and executor, which gets the ``options``; ``adam`` replaces both kernels."""

    late_s = 0.0

    def __init__(
        self,
        model: Model,
        plan: UpdatePlan,
        device: Device[Any],
        disk_folders: Sequence[Path] = (),
        adam: AdamKernel | None = None,
        **options: Any,
    ) -> None:
        self.model, self.plan, self.device = model, plan, device
        self._gathers, self._has_skipped = device.stream(), False
        initial = random_states(model.numels, model.dtype)
        reserve = device.empty_host if model.params_on_host else device.empty
        self.params = [reserve(numel, model.dtype) for numel in model.numels]
        more = {"params_on_host": model.params_on_host, "disk_folders": disk_folders}
        self.memory = StateMemory(plan.workload, self.params, model.grad_dtype, device, **more)
        for tensors, state in zip(self.memory.sub_groups, initial, strict=True):
            for name in STATES:
                getattr(tensors, name).copy_(getattr(state, name))
        for param, state in zip(self.params, initial, strict=True):
            param.copy_(state.master)
        self.memory.lock()
        self.memory.set_plan(plan)
        self.host_adam: AdamKernel = adam or fused()
        self.device_adam: AdamKernel = adam or fused()
        if isinstance(device, CudaDevice):
            accelerator = device.empty(0, model.dtype).device
            self.device_adam = TritonAdam(machine_arithmetic(), BETAS, adamw=True, device=accelerator)
        kernels = self.host_adam, self.device_adam
        self.executor = Executor(plan.schedule, self.memory.units, device, *kernels, **options)

    def train(self, iterations: Sequence[MovingIteration]) -> list[torch.Tensor]:
        read: list[torch.Tensor] = []
        for number, iteration in enumerate(iterations):
            if iteration.plan is not self.plan:
                self.change(iteration.plan)
            read.extend(self.run(number, iteration))
        return [*read, *self.end()]

    def end(self) -> list[torch.Tensor]:
        self.executor.end()
        self.executor.sync_states_to_host()
        self._wait_for_caller()
        found = self.states
        self.executor.close()
        self.host_adam.close()
        self.device_adam.close()
        self.memory.close()
        return found

    @property
    def states(self) -> list[torch.Tensor]:
        states = (getattr(tensors, name) for tensors in self.memory.sub_groups for name in STATES)
        return [tensor.clone() for tensor in (*states, *self.params)]

    def run(self, number: int, iteration: MovingIteration) -> Iterator[torch.Tensor]:
        if number > 0:
            yield self.read_gradients()
        if iteration.writes_states:
            self.executor.end()
            self.executor.sync_states_to_host()
            if self._has_skipped:
                # A prefetch of the skipped update may still read them, to no effect.
                self.executor._lanes.drain()
            for tensors in self.memory.sub_groups:
                tensors.master.mul_(WRITTEN)
        yield from (self._copy_of(param) for param in self.params)
        yield from self.train_step(number, iteration)

    def train_step(self, number: int, iteration: MovingIteration) -> Iterator[torch.Tensor]:
        """Run backward, the update and a forward during it, and yield the parameters that forward reads."""
        self.backward(number)
        if iteration.prefetches:
            self.executor.prefetch()
        self._has_skipped = iteration.is_skipped
        if not iteration.is_skipped or iteration.advances:
            self.speculate(1 + number, random.Random(iteration.speculation))
        if iteration.is_skipped:
            self._wait_for_caller()  # the host waits for the norm before it skips an update
            self.executor.forget_speculations()
            return
        self.executor.begin([adam_step(1 + number)] * len(self.params))
        yield from self._forward(iteration)
        if iteration.overlaps_flushes:
            self.executor.end(Waiter.STREAM)
        else:
            self.executor.end()
        assert self.executor.failure is None, self.executor.failure

    def speculate(self, step: int, chance: random.Random) -> None:
        """Start the steps of some eager units. Steps with other hyperparameters, or that are discarded, are in vain."""
        ready = self.device.event()
        self.device.current_stream().record(ready)
        scales = chance.choice([(), (0.5,), (0.5,), (0.25,), (0.25, 0.5), (0.5, 0.25)]) if self.plan.eager else ()
        for grad_scale in scales:
            units = [unit for unit in sorted(self.plan.eager) if chance.random() < 0.7]
            self.executor.speculate(units, [adam_step(step, grad_scale)] * len(self.params), ready, ready)
            if chance.random() < 0.2:
                self.executor.sync_states_to_host()
            if chance.random() < 0.2:
                self.executor.forget_speculations(units[:1])

    def _forward(self, iteration: MovingIteration) -> Iterator[torch.Tensor]:
        caller, written, done = self.device.current_stream(), self.device.event(), self.device.event()
        if iteration.writes_params and self.plan.workload.persistent_unit is not None:
            self.executor.publish(self.plan.workload.persistent_unit)
            for part in self.memory.units[self.plan.workload.persistent_unit].parts:
                yield self._copy_of(part.param)
                value = self.device.empty(part.param.numel(), part.param.dtype).fill_(WRITTEN)
                self.device.copy(part.param, value)
            # The script orders gathers behind its own writes. It does not order them behind our publications.
            caller.record(written)
            self._gathers.wait(written)
        for position in iteration.forward:
            unit = position % len(self.memory.units)
            if iteration.advances:
                self.executor.advance()
            with self._gathers.issue():
                self.executor.publish(unit)
                gathered = [self._copy_of(part.param) for part in self.memory.units[unit].parts]
            self._gathers.record(done)
            caller.wait(done)
            yield from gathered

    def backward(self, number: int) -> None:
        whole = [self._copy_of(each) for each in self.model.gradients(number)]
        self.device.occupy(self.late_s)
        for part in self.memory.parts:
            self.device.copy(part.grad, part.elements.view(whole[part.sub_group]))

    def read_gradients(self) -> torch.Tensor:
        """Return a copy of the gradients of all sub-groups. The host immediately reads those in host memory."""
        found = [torch.empty(numel, dtype=self.model.grad_dtype) for numel in self.model.numels]
        copied = []
        for unit in self.memory.units:
            on_host = unit.placement is Placement.CPU
            copied += [(part, part.grad.clone() if on_host else self._copy_of(part.grad)) for part in unit.parts]
        self._wait_for_caller()
        for part, grad in copied:
            part.elements.view(found[part.sub_group]).copy_(grad)
        return torch.cat(found)

    def change(self, plan: UpdatePlan) -> None:
        """Use ``plan`` from the next update on. Units move unless only the order or the number of slots is another."""
        if all(getattr(plan, name) == getattr(self.plan, name) for name in ("workload", "placements", "eager")):
            self.executor.load_plan(plan.schedule, self.memory.units)
            self.plan = plan
        else:
            self.move(plan)

    def move(self, plan: UpdatePlan) -> None:
        """Use ``plan`` from the next update on. Resident units are written back first."""
        self.executor.sync_states_to_host()
        self.set_plan(plan)

    def set_plan(self, plan: UpdatePlan) -> None:
        """Use ``plan`` from the next update on. The caller has written back all units that it moves."""
        self.memory.set_plan(plan)
        self.executor.load_plan(plan.schedule, self.memory.units)
        self.plan = plan

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = self.device.empty(tensor.numel(), tensor.dtype)
        self.device.copy(copied, tensor)
        return copied

    def _wait_for_caller(self) -> None:
        done = self.device.event()
        self.device.current_stream().record(done)
        done.synchronize()


def train_serially(model: Model, iterations: Sequence[MovingIteration]) -> list[torch.Tensor]:
    """Return the tensors that ``MovingTraining.train`` returns, with an update of one whole sub-group after another."""
    states = random_states(model.numels, model.dtype)
    params = [tensors.param for tensors in states if tensors.param is not None]
    kernel = fused()
    read: list[torch.Tensor] = []
    for number, iteration in enumerate(iterations):
        if number > 0:
            read.append(torch.cat(model.gradients(number - 1)))
        if iteration.writes_states:
            for tensors in states:
                tensors.master.mul_(WRITTEN)
        read.extend(param.clone() for param in params)
        if iteration.is_skipped:
            continue
        kernel.begin_step([adam_step(1 + number)] * len(states))
        for index, (tensors, gradient) in enumerate(zip(states, model.gradients(number), strict=True)):
            kernel.update(index, replace(tensors, grad=gradient))
        units, persistent = iteration.plan.workload.units, iteration.plan.workload.persistent_unit

        def params_of(unit: Unit) -> list[torch.Tensor]:
            return [params[run.sub_group][run.begin : run.end] for run in unit.ranges]

        if iteration.writes_params and persistent is not None:
            for param in params_of(units[persistent]):
                read.append(param.clone())
                param.fill_(WRITTEN)
        for position in iteration.forward:
            read.extend(param.clone() for param in params_of(units[position % len(units)]))
    kernel.close()
    return [*read, *(getattr(tensors, name) for tensors in states for name in STATES), *params]


def random_plan(chance: random.Random, model: Model) -> UpdatePlan:
    """Return a random plan. Half have cuts anywhere, so that a sub-group's last elements are in several units."""
    multiple = chance.choice((1, BORDER_MULTIPLE))
    units: list[Unit] = []
    for sub_group, numel in enumerate(model.numels):
        possible = range(multiple, numel, multiple)
        cuts = sorted(chance.sample(possible, min(len(possible), chance.randint(0, 4))))
        for begin, end in zip([0, *cuts], [*cuts, numel], strict=True):
            units.append(Unit(len(units), (Range(sub_group, begin, end - begin),)))
    plan = UpdatePlan(
        workload=Workload(tuple(units)),
        placements=tuple(chance.choice(list(Placement)) for _ in units),
        num_slots=chance.randint(1, 3),
        order=tuple(chance.sample(range(len(units)), len(units))),
    )
    plan = with_persistent(plan, model.persistent)
    eligible = sorted(TrainingSetup(params_on_host=model.params_on_host).eligible_as_eager(plan))
    return replace(plan, eager=frozenset(unit for unit in eligible if chance.random() < 0.5))


@st.composite
def models(draw: st.DrawFn) -> Model:
    numels = tuple(draw(st.lists(st.integers(1, 150), min_size=1, max_size=3)))
    persistent = []
    for numel in numels:
        borders = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
        persistent.append(list(zip(borders[::2], borders[1::2], strict=False)))
    return Model(
        numels=numels,
        persistent=persistent,
        dtype=draw(st.sampled_from(DTYPES)),
        grad_dtype=draw(st.sampled_from(DTYPES)),
        params_on_host=draw(st.booleans()),
    )


def random_iterations(chance: random.Random, model: Model, count: int, *, moves: bool) -> list[MovingIteration]:
    """Return iterations whose plan changes at random if ``moves``, sometimes only its order and number of slots."""
    plans = [random_plan(chance, model) for _ in range(3 if moves else 1)]
    if moves:
        order = tuple(chance.sample(range(len(plans[0].placements)), len(plans[0].placements)))
        plans += [replace(plans[0], num_slots=number, order=order) for number in (1, 3)]
    return iterations_of(chance, plans, count)


def iterations_of(chance: random.Random, plans: Sequence[UpdatePlan], count: int) -> list[MovingIteration]:
    return [
        MovingIteration(
            plan=chance.choice(plans),
            writes_states=chance.random() < 0.2,
            prefetches=chance.random() < 0.5,
            is_skipped=chance.random() < 0.2,
            speculation=chance.randrange(2**32),
            forward=[chance.randrange(12) for _ in range(chance.randint(0, 5))],
            advances=chance.random() < 0.5,
            writes_params=chance.random() < 0.5,
            overlaps_flushes=chance.random() < 0.5,
        )
        for _ in range(count)
    ]
