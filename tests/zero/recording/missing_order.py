"""Ways to take a piece of synchronisation away: each is called for the context in which it is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator

from deep_opt_states.runtime import executor
from deep_opt_states.runtime.early_update import FirstParts
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.readers import Guarded
from deep_opt_states.zero.step.update import Update
from perf_model.schedule.action import ActionKind
from perf_model.schedule.plan import UpdatePlan
from tests.zero.recording.collectives import Handle


def patched(owner: Any, name: str, replacement: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(owner, name, replacement)


def nothing(*_: object) -> None:
    """Stands for a wait."""


def waits_for_the_numbers_only(self: Handle, *_: object) -> None:
    """Orders no stream."""
    self._work.wait()


def together(*seeded: Callable[[], AbstractContextManager[object]]) -> Callable[[], AbstractContextManager[object]]:
    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for each in seeded:
                stack.enter_context(each())
            yield

    return all_of_them


update_ends_with_transfers_in_flight = patched(Executor, "_drain_streams", nothing)


@contextmanager
def the_same_from_the_fourth_step_on() -> Iterator[None]:
    drain, updates = Executor._drain_streams, count(1)

    def drained_at_first(self: Executor) -> None:
        if next(updates) < 4:
            drain(self)

    with mock.patch.object(Executor, "_drain_streams", drained_at_first):
        yield


def on_a_stream_of_its_own(owner: type, name: str) -> Callable[[], AbstractContextManager[object]]:
    """The method's work is issued on a stream that waits for the caller's, and that nobody waits for."""
    original = getattr(owner, name)

    def elsewhere(self: Any, *args: Any) -> Any:
        accelerator = get_accelerator()
        side = accelerator.Stream()
        side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            return original(self, *args)

    return patched(owner, name, elsewhere)


def without_waits_of(kind: ActionKind) -> Callable[[], AbstractContextManager[object]]:
    """Every action of that kind starts whenever its lane gets there."""

    @contextmanager
    def seeded() -> Iterator[None]:
        original = UpdatePlan.schedule.func

        def careless(self: UpdatePlan) -> Any:
            schedule = original(self)
            actions = (
                replace(action, waits=() if action.kind is kind else action.waits) for action in schedule.actions
            )
            return replace(schedule, actions=tuple(actions))

        with (
            mock.patch.object(UpdatePlan, "schedule", property(careless)),
            mock.patch.object(executor, "check"),
        ):
            yield

    return seeded


forward_knows_nothing = together(patched(Executor, "publish", nothing), patched(Executor, "advance", nothing))
"""Of the update."""


def backward_does_not_wait() -> AbstractContextManager[object]:
    """For the end of the update, by either of its doors; nor does it mind that it is under way."""
    stack = ExitStack()
    for door in ("backward_prologue", "partition_grads"):
        stack.enter_context(_without_finish(door))
    stack.enter_context(mock.patch.object(Executor, "prefetch", _prefetch_anyway(Executor.prefetch)))
    return stack


def _without_finish(door: str) -> AbstractContextManager[object]:
    original = getattr(DeepOptimizerStates_Stage3, door)

    def entered(self: Any, *args: Any) -> Any:
        with mock.patch.object(Update, "end", nothing):
            return original(self, *args)

    return mock.patch.object(DeepOptimizerStates_Stage3, door, entered)


def _prefetch_anyway(prefetch: Callable[[Executor], None]) -> Callable[[Executor], None]:
    def prefetched(self: Executor) -> None:
        pending, self.pending = self.pending, False
        prefetch(self)
        self.pending = pending

    return prefetched


@contextmanager
def first_parts_with(fault: Callable[[FirstParts], object]) -> Iterator[None]:
    made = FirstParts.__init__

    def make(self: FirstParts, *args: Any) -> None:
        made(self, *args)
        fault(self)

    with mock.patch.object(FirstParts, "__init__", make):
        yield


def does_not_wait_for_gradients(first_parts: FirstParts) -> None:
    first_parts._gone_down.synchronize = nothing  # type: ignore[method-assign, assignment]


def does_not_wait_for_the_worker(first_parts: FirstParts) -> None:
    """For the numbers only."""
    submit = first_parts._worker.submit

    def submitted(task: Callable[[], None]) -> Any:
        future = submit(task)
        return mock.Mock(result=future.exception)

    first_parts._worker = mock.Mock(submit=submitted)


def unguarded(name: str) -> Callable[[], AbstractContextManager[object]]:
    guard = Guarded(nothing)
    guard.__set_name__(DeepOptimizerStates_Stage3, name)
    return patched(DeepOptimizerStates_Stage3, name, guard)
