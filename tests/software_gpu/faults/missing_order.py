"""Take one piece of synchronization away. Each function here returns a context in which that piece is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partialmethod
from itertools import count
from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deep_opt_states.runtime import executor
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.lanes import LaneStreams
from deep_opt_states.runtime.write_back import StatesElsewhere
from deep_opt_states.zero.guarded_states import GuardedStates, WaitsBeforeRead
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.update import Update
from perf_model.schedule.action import ActionKind
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from tests.software_gpu import device
from tests.software_gpu.plugged import SoftwareAccelerator
from tests.software_gpu.process_group import SoftwareProcessGroup, SoftwareWork


def patched(owner: Any, name: str, replacement: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(owner, name, replacement)


def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], AbstractContextManager[object]]:
    """Call ``method`` with the object, the original method and its arguments."""
    return patched(owner, name, partialmethod(method, getattr(owner, name)))


def do_nothing(*_: object) -> None:
    pass


def missing(owner: Any, wait: str) -> Callable[[], AbstractContextManager[object]]:
    """Replace a wait, the method of ``owner`` with this name, by nothing."""
    return patched(owner, wait, do_nothing)


def combined(*seeded: Callable[[], AbstractContextManager[object]]) -> Callable[[], AbstractContextManager[object]]:
    @contextmanager
    def combination() -> Iterator[None]:
        with ExitStack() as stack:
            for context in seeded:
                stack.enter_context(context())
            yield

    return combination


END_OF_UPDATE = ("wait_until_drained", "order_after_update")

update_does_not_drain = combined(*(missing(LaneStreams, name) for name in END_OF_UPDATE))


def _at_first(name: str) -> Callable[[], AbstractContextManager[object]]:
    wait, updates = getattr(LaneStreams, name), count(1)
    return patched(LaneStreams, name, lambda lanes: wait(lanes) if next(updates) < 4 else None)


def update_does_not_drain_from_the_fourth_step_on() -> AbstractContextManager[object]:
    return combined(*map(_at_first, END_OF_UPDATE))()


def _set_without_flushes(issuer: Issuer, set_schedule: Any, schedule: Schedule) -> None:
    set_schedule(issuer, schedule)
    issuer.flushes_before = {}


prefetches_do_not_wait = replaced(Issuer, "set_schedule", _set_without_flushes)
"""Prefetch for the next update while the last one still flushes the slots and the states that are read."""


def _on_side_stream(self: Any, original: Any, *args: Any) -> Any:
    accelerator = get_accelerator()
    side = accelerator.Stream()
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        return original(self, *args)


def on_an_unawaited_stream(owner: type, name: str) -> Callable[[], AbstractContextManager[object]]:
    """Issue the method's operations on a new stream, which waits for the caller's but which no stream waits for."""
    return replaced(owner, name, _on_side_stream)


def actions_do_not_wait(kind: ActionKind) -> Callable[[], AbstractContextManager[object]]:
    """Remove all waits of the actions of this kind: each begins as soon as its lane reaches it."""

    original = UpdatePlan.schedule.func

    def schedule_without_waits(self: UpdatePlan) -> Any:
        schedule = original(self)
        actions = (replace(action, waits=() if action.kind is kind else action.waits) for action in schedule.actions)
        return replace(schedule, actions=tuple(actions))

    schedules = patched(UpdatePlan, "schedule", property(schedule_without_waits))
    return combined(schedules, missing(executor, "check_executable"))


forward_does_not_wait = combined(missing(Executor, "publish"), missing(Executor, "advance"))
"""A context in which forward neither waits for the update nor enqueues its actions."""


def worker_begins_after_the_step() -> AbstractContextManager[object]:
    """Submit the worker's actions at the end of ``step()``, after DeepSpeed has waited for the whole device."""
    nothing_in_begin = property(lambda _: 0, lambda _, __: None)
    return mock.patch.object(Issuer, "first_of_caller", nothing_in_begin, create=True)


def gathers_keep_their_first_units() -> AbstractContextManager[object]:
    """Look up the units of a parameter in the first plan, even after another plan was adopted."""
    units_of_plan = Gathers._units.fget  # type: ignore[attr-defined]
    first: dict[int, dict[int, tuple[int, ...]]] = {}

    def first_units(self: Gathers) -> dict[int, tuple[int, ...]]:
        units = first.setdefault(id(self), units_of_plan(self))
        count = len(self._running.plan.placements)
        return {ds_id: tuple(unit for unit in held_by if unit < count) for ds_id, held_by in units.items()}

    return mock.patch.object(Gathers, "_units", property(first_units))


def _call_without_wait(self: Any, hook: Any, *args: Any) -> Any:
    with mock.patch.object(Update, "wait_on_stream", do_nothing):
        return hook(self, *args)


def _prefetch_anyway(self: Executor, prefetch: Any) -> None:
    pending, self._pending = self._pending, False
    prefetch(self)
    self._pending = pending


backward_does_not_wait = combined(
    *(
        replaced(DeepOptimizerStates_Stage3, hook, _call_without_wait)
        for hook in ("backward_prologue", "partition_grads")
    ),
    replaced(Executor, "prefetch", _prefetch_anyway),
    missing(Executor, "forget_replaced_tensors"),
)
"""Remove backward's waits for the update in both of its hooks, and prefetch and discard gradients regardless."""


def resident_states_with(fault: Callable[[StatesElsewhere], object]) -> Callable[[], AbstractContextManager[object]]:
    def initialize(self: StatesElsewhere, original: Any, *args: Any) -> None:
        original(self, *args)
        fault(self)

    return replaced(StatesElsewhere, "__init__", initialize)


def compute_does_not_wait_for_the_load(residents: StatesElsewhere) -> None:
    residents._compute = mock.Mock(wait=do_nothing)


def does_not_wait_for_the_write_back(residents: StatesElsewhere) -> None:
    residents._written.synchronize = do_nothing


def readers_do_not_wait(name: str) -> Callable[[], AbstractContextManager[object]]:
    attribute = WaitsBeforeRead(do_nothing)
    attribute.__set_name__(GuardedStates, name)
    return patched(GuardedStates, name, attribute)


class IndependentStream(device.Stream):
    def wait_stream(self, stream: Any) -> None:
        """Replace the wait."""


streams_do_not_wait_for_streams = patched(SoftwareAccelerator, "Stream", property(lambda _: IndependentStream))


class UnawaitedWork(SoftwareWork):
    def wait(self, *_: Any) -> bool:
        return True


def _run_unawaited(self: SoftwareProcessGroup, run: Any, method: str, *args: Any) -> dist.Work:
    work: dist.Work = run(self, method, *args)
    if method in ("_allgather_base", "all_gather_single"):
        work.__class__ = UnawaitedWork
    return work


all_gathers_are_not_awaited = replaced(SoftwareProcessGroup, "_run", _run_unawaited)
