"""Execute schedules on the fake device, and compare the results with the serial reference bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from hypothesis import strategies as st

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import UnitState
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from tests.fake_device.device import FakeDevice, LateAdam
from tests.fake_device.fake_worker import FakeWorker
from tests.fake_device.timing import Late, Seeded, Timing
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import fill_gradients, gradients, make_states, place, tensors_of, update_serially
from tests.runtime.whole_update import run_update

ORDERS = [
    (first, *(lane for lane in range(len(Lane)) if lane not in (first, last)), last)
    for first, last in permutations(range(len(Lane)), 2)
]
"""Orders of priority of the four streams and the CPU lane: each lane is once first for each other lane that is last."""

timings = st.one_of(st.builds(Late, st.sampled_from(ORDERS)), st.builds(Seeded, st.integers(0, 2**32)))


def pinned_states(
    device: FakeDevice,
    numels: Sequence[int],
    dtype: torch.dtype,
    *,
    grad_dtypes: Sequence[torch.dtype] = (),
    params_on_host: bool = False,
) -> list[UnitState]:
    """Return states in page-locked host memory.

    The parameters are in device memory, or in page-locked host memory if ``params_on_host``. Memory that is written
    before it is read is NaN.
    """
    states = make_states(numels, dtype, grad_dtypes=grad_dtypes)
    staging = device.empty(max(numels, default=0), dtype) if params_on_host else None
    for state in states:
        (part,) = state.parts
        for name in ("master", "exp_avg", "exp_avg_sq", "grad"):
            plain = getattr(part, name)
            setattr(part, name, device.empty_host(plain.numel(), plain.dtype).copy_(plain))
        if staging is not None:
            part.param = part.rounded = device.empty_host(state.length, dtype).copy_(part.param)
            part.staged = staging.narrow(0, 0, state.length)
            continue
        part.rounded = part.master if dtype == torch.float32 else device.empty_host(state.length, dtype)
        part.param = device.empty(state.length, dtype).copy_(part.param)
    return states


def hostile_executor(schedule: Schedule, states: Sequence[UnitState], device: FakeDevice) -> Executor:
    """Return an executor on ``device``, whose kernels and worker also run as late as the device's timing decides.

    The memory of the units that are resident in ``schedule`` is reserved.
    """
    place(states, schedule, device)
    return Executor(schedule, states, device, PlainAdam(), LateAdam(device, PlainAdam()), worker=FakeWorker(device))


@dataclass
class Trained:
    """The results of a training run: ``read`` has every unit's parameters as each step's backward read them.

    ``last`` reads the timeline of the last update. The host waits for the update there, so compare the results first.
    """

    states: list[UnitState]
    read: list[torch.Tensor]
    last: Callable[[], Timeline] = lambda: Timeline(())


def run(
    schedule: Schedule, numels: Sequence[int], timing: Timing, steps: int = 2, dtype: torch.dtype = torch.bfloat16
) -> Trained:
    """Return the results of training with ``schedule``.

    Each update begins before the device has done backward, and the host reads its results at once.
    """
    device = FakeDevice(timing)
    trained = Trained(pinned_states(device, numels, dtype), [])
    executor = hostile_executor(schedule, trained.states, device)
    for step in range(1, steps + 1):
        for state, gradient in zip(trained.states, gradients(numels, step), strict=True):
            trained.read.append(device.empty(state.length, dtype))
            device.copy(trained.read[-1], state.parts[0].param)
            device.copy(state.parts[0].grad, device.empty(state.length, torch.float32).copy_(gradient))
        run_update(executor, [adam_step(step)] * len(numels))
    trained.last = executor.timeline_reader()
    executor.sync_states_to_host()
    return trained


def serial(numels: Sequence[int], steps: int = 2, dtype: torch.dtype = torch.bfloat16) -> Trained:
    """Return the results of training in which one unit is updated after the other, without a device."""
    trained = Trained(make_states(numels, dtype), [])
    for step in range(1, steps + 1):
        trained.read.extend(state.parts[0].param.clone() for state in trained.states)
        fill_gradients(trained.states, step)
        update_serially(trained.states, PlainAdam(), [adam_step(step)] * len(numels))
    return trained


def same(found: Trained, expected: Trained) -> bool:
    """Return whether all results are equal, bit for bit.

    Memory that was read before it was written, or after it was freed, is NaN, which equals nothing.
    """
    pairs = list(zip(found.read, expected.read, strict=True))
    pairs += zip(tensors_of(found.states), tensors_of(expected.states), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


NUMELS = (5, 3, 8, 2, 7, 4)


def small_plans(numbers_of_slots: Iterable[int] = range(1, 5)) -> Iterator[UpdatePlan]:
    """Yield all placements of 4 units, and mixed placements of 6, each with these numbers of slots."""
    for count, codes in ((4, range(2**4)), (6, (0b111111, 0b010101, 0b110110, 0b011110))):
        for code in codes:
            placements = tuple(Placement.STREAMED if code >> index & 1 else Placement.CPU for index in range(count))
            for num_slots in numbers_of_slots:
                workload = Workload.from_numels(list(NUMELS[:count]))
                yield UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
