"""Synchronisation taken away, one piece at a time: the recording must show each, or it could not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest import mock

import torch
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.runtime import executor
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.first_parts import FirstParts
from deep_opt_states.zero.gathers import Gathers
from deep_opt_states.zero.gradients import Gradients
from deep_opt_states.zero.guarded import Guarded
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.update import Update
from perf_model.action import ActionKind
from perf_model.plan import UpdatePlan
from tests.zero.parity.case import CPU, NOT_AHEAD, STREAMED, STREAMED_MANY_SLOTS, STREAMED_ONE_SLOT, Case
from tests.zero.recording.accelerator import RecordedStream
from tests.zero.recording.collectives import Handle
from tests.zero.recording.recorder import FREED, UNORDERED, Finding, Recorder


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``expected`` are the rule, the memory, and a word of each side of one finding that must be there."""

    name: str
    seeded: Callable[[], AbstractContextManager[object]]
    expected: tuple[str, str, str, str]
    block: dict[str, Any]
    world_size: int = 1
    steps: int = 3
    zero: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return Case(
            name=self.name,
            blocks=(self.block,),
            world_size=self.world_size,
            zero=self.zero,
            steps=self.steps,
            clip=0.3,
        )

    def shown_by(self, finding: Finding) -> bool:
        rule, memory, one, other = self.expected
        first, second = finding.sides
        either = (one in first and other in second) or (other in first and one in second)
        return finding.rule == rule and memory in finding.memory and either


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


def after_each_step(look: Callable[[Any], object]) -> Callable[[], AbstractContextManager[object]]:
    """A user's script that looks at the optimizer before the next forward."""
    step = DeepSpeedEngine.step

    def looked_at(self: Any, *args: Any) -> None:
        step(self, *args)
        look(self.optimizer)

    return patched(DeepSpeedEngine, "step", looked_at)


def look_at_masters(optimizer: Any) -> None:
    for master in optimizer.fp32_partitioned_groups_flat:
        master.sum()


def look_at_moments(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].sum()


def look_at_parameters(optimizer: Any) -> None:
    for param in optimizer.fp16_partitioned_groups_flat:
        param.sum()


def look_at_gathered(optimizer: Any) -> None:
    params = [param for group in optimizer.fp16_groups for param in group]
    with zero.GatheredParameters(params):
        for param in params:
            param.sum()


def look_at_kept(optimizer: Any) -> None:
    """DeepSpeed keeps them gathered."""
    for param in optimizer.persistent_parameters:
        param.sum()


LOOKS = (look_at_kept, look_at_masters, look_at_moments, look_at_parameters, look_at_gathered)

RESIDENT = {"placement": ["resident"] * 5}
SINGLE_PARAMETER_BUCKETS = {"reduce_bucket_size": 1}
CONTIGUOUS_BUCKETS = {"reduce_bucket_size": 4000, "reduce_scatter": False}

NOTHING_IS_KEPT = {"stage3_param_persistence_threshold": 0}
"""With several ranks DeepSpeed waits for the whole device when it gathers what it keeps, at the end of its step."""


def at_once(block: dict[str, Any]) -> dict[str, Any]:
    """``step()`` returns when all is updated."""
    return {**block, "overlap_forward": False}


FAULTS = (
    # The 16-bit parameters, before the gather that reads them and before a direct use
    Fault(
        name="published while the next forward reads the flat buffer",
        seeded=update_ends_with_transfers_in_flight,
        block=at_once(CPU),
        expected=(UNORDERED, "16-bit parameters", "_publish", "forward"),
    ),
    Fault(
        name="updated on the accelerator while the next forward reads the flat buffer",
        seeded=update_ends_with_transfers_in_flight,
        block=at_once(STREAMED),
        expected=(UNORDERED, "16-bit parameters", "_gpu_step", "forward"),
    ),
    Fault(
        name="published while the all-gather reads",
        seeded=update_ends_with_transfers_in_flight,
        block=at_once(CPU),
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "_publish", "all_gather_into_tensor"),
    ),
    Fault(
        name="updated on the accelerator while the all-gather reads",
        seeded=update_ends_with_transfers_in_flight,
        block=at_once(STREAMED),
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "_gpu_step", "all_gather_into_tensor"),
    ),
    Fault(
        name="flushed while the next step prefetches",
        seeded=update_ends_with_transfers_in_flight,
        block={**at_once(STREAMED_MANY_SLOTS), "overlap_backward": False},
        expected=(UNORDERED, "master of sub-group", "_flush_states", "_prefetch"),
    ),
    Fault(
        name="published late, but not at first",
        seeded=the_same_from_the_fourth_step_on,
        block=at_once(CPU),
        steps=6,
        expected=(UNORDERED, "16-bit parameters", "_publish", "forward"),
    ),
    # The same where the update goes on in the next forward
    Fault(
        name="deferred: published while the next forward reads",
        seeded=patched(Executor, "publish", nothing),
        block=CPU,
        expected=(UNORDERED, "16-bit parameters", "_publish", "forward"),
    ),
    Fault(
        name="deferred: updated on the accelerator while the next forward reads",
        seeded=patched(Executor, "publish", nothing),
        block=STREAMED,
        expected=(UNORDERED, "16-bit parameters", "_gpu_step", "forward"),
    ),
    Fault(
        name="deferred: published while the all-gather reads",
        seeded=patched(Executor, "publish", nothing),
        block=CPU,
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "_publish", "all_gather_into_tensor"),
    ),
    Fault(
        name="deferred: updated on the accelerator while the all-gather reads",
        seeded=patched(Executor, "publish", nothing),
        block=STREAMED,
        world_size=2,
        zero=NOTHING_IS_KEPT,
        expected=(UNORDERED, "16-bit parameters", "_gpu_step", "all_gather_into_tensor"),
    ),
    Fault(
        name="deferred: updated while a user's gather reads",
        seeded=together(patched(Gathers, "_settle", nothing), after_each_step(look_at_gathered)),
        block=STREAMED,
        world_size=2,
        zero=NOTHING_IS_KEPT,
        expected=(UNORDERED, "16-bit parameters", "_gpu_step", "all_gather_into_tensor"),
    ),
    # What DeepSpeed keeps gathered
    Fault(
        name="first parts published while step gathers them",
        seeded=patched(FirstParts, "wait", nothing),
        block=CPU,
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "first_parts.py", "all_gather_into_tensor"),
    ),
    Fault(
        name="first parts updated on the accelerator while step gathers them",
        seeded=patched(FirstParts, "wait", nothing),
        block=RESIDENT,
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "fused Adam in first_parts.py", "all_gather_into_tensor"),
    ),
    Fault(
        name="first parts published while they are used in place",
        seeded=together(patched(FirstParts, "wait", nothing), after_each_step(look_at_kept)),
        block=CPU,
        expected=(UNORDERED, "16-bit parameters", "first_parts.py", "aten::sum in arm.py"),
    ),
    Fault(
        name="first parts updated on the accelerator while they are used in place",
        seeded=together(patched(FirstParts, "wait", nothing), after_each_step(look_at_kept)),
        block=RESIDENT,
        expected=(UNORDERED, "16-bit parameters", "fused Adam in first_parts.py", "aten::sum in arm.py"),
    ),
    Fault(
        name="first parts updated before their gradients are there",
        seeded=lambda: first_parts_with(does_not_wait_for_gradients),
        block=STREAMED,
        expected=(UNORDERED, "gradients of first parts", "_gradients_down", "fused Adam in first_parts.py"),
    ),
    Fault(
        name="first parts published before the worker has rounded",
        seeded=lambda: first_parts_with(does_not_wait_for_the_worker),
        block=STREAMED,
        expected=(UNORDERED, "rounded copy of first parts", "fused Adam in first_parts.py", "copy"),
    ),
    # Backward meets no update under way
    Fault(
        name="slot prefetched into in backward while it is flushed",
        seeded=update_ends_with_transfers_in_flight,
        block=STREAMED,
        expected=(UNORDERED, "slot", "_flush_states", "_prefetch"),
    ),
    Fault(
        name="states prefetched in backward while they are flushed",
        seeded=update_ends_with_transfers_in_flight,
        block=STREAMED_MANY_SLOTS,
        expected=(UNORDERED, "master of sub-group", "_flush_states", "_prefetch"),
    ),
    Fault(
        name="slot prefetched into in backward, which does not wait, while it is flushed",
        seeded=backward_does_not_wait,
        block=STREAMED,
        expected=(UNORDERED, "slot", "_flush_states", "_prefetch"),
    ),
    # Forward has gathered by then, and waited for the updates: what reads the gradients is ordered even without that.
    Fault(
        name="gradients copied while the worker reads the last ones",
        seeded=together(forward_knows_nothing, backward_does_not_wait),
        block=CPU,
        expected=(UNORDERED, "gradient of sub-group", "_send", "_cpu_step"),
    ),
    Fault(
        name="gradients summed while the accelerator reads the last ones",
        seeded=together(patched(Executor, "publish", nothing), backward_does_not_wait),
        block=STREAMED,
        expected=(UNORDERED, "gradient of sub-group", "_add", "_gpu_step"),
    ),
    # Neither does anybody else
    Fault(
        name="masters read while the worker updates them",
        seeded=together(unguarded("fp32_partitioned_groups_flat"), after_each_step(look_at_masters)),
        block=CPU,
        expected=(UNORDERED, "master of sub-group", "_cpu_step", "aten::sum in arm.py"),
    ),
    Fault(
        name="masters read while they are flushed",
        seeded=together(unguarded("fp32_partitioned_groups_flat"), after_each_step(look_at_masters)),
        block=STREAMED,
        expected=(UNORDERED, "master of sub-group", "_flush_states", "aten::sum in arm.py"),
    ),
    Fault(
        name="moments read while they are flushed",
        seeded=together(
            patched(DeepOptimizerStates_Stage3, "state", DeepSpeedZeroOptimizer_Stage3.state),
            after_each_step(look_at_moments),
        ),
        block=STREAMED,
        expected=(UNORDERED, "exp_avg of sub-group", "_flush_states", "aten::sum in arm.py"),
    ),
    Fault(
        name="16-bit parameters read while they are published",
        seeded=together(unguarded("fp16_partitioned_groups_flat"), after_each_step(look_at_parameters)),
        block=CPU,
        expected=(UNORDERED, "16-bit parameters", "_publish", "aten::sum in arm.py"),
    ),
    # Gradients: staged before the bucket is reduced into again
    Fault(
        name="staged late out of a bucket buffer",
        seeded=on_a_stream_of_its_own(DeepOptimizerStates_Stage3, "partition_grads"),
        block=CPU,
        zero=CONTIGUOUS_BUCKETS,
        expected=(UNORDERED, "gradient bucket", "_send", "__add_grad_to_ipg_bucket"),
    ),
    Fault(
        name="staged late out of a single-parameter bucket",
        seeded=on_a_stream_of_its_own(DeepOptimizerStates_Stage3, "partition_grads"),
        block=CPU,
        zero=SINGLE_PARAMETER_BUCKETS,
        # DeepSpeed records the gradient on the stream that it believes to be the reduction's.
        expected=(FREED, "backward", "freed on default stream", "reduce_scatter"),
    ),
    # The worker reads what has been copied
    Fault(
        name="gradients copied on a stream that the worker does not know",
        seeded=patched(Gradients, "arrive", nothing),
        block=CPU,
        expected=(UNORDERED, "gradient of sub-group", "_send", "_cpu_step"),
    ),
    Fault(
        name="published before the worker has rounded",
        seeded=without_waits_of(ActionKind.PUBLISH),
        block=CPU,
        expected=(UNORDERED, "rounded copy of sub-group", "_cpu_step", "_publish"),
    ),
    # Slots
    Fault(
        name="slot taken over before it is flushed",
        seeded=without_waits_of(ActionKind.PREFETCH),
        # What waits for nothing would all be prefetched in backward.
        block={**STREAMED_ONE_SLOT, **NOT_AHEAD},
        expected=(UNORDERED, "slot", "_flush_states", "_prefetch"),
    ),
    Fault(
        name="updated before it is prefetched",
        seeded=without_waits_of(ActionKind.GPU_STEP),
        block=STREAMED,
        expected=(UNORDERED, "slot", "_prefetch", "_gpu_step"),
    ),
    Fault(
        name="moments updated while they are prefetched",
        seeded=without_waits_of(ActionKind.GPU_STEP),
        block=STREAMED,
        expected=(UNORDERED, "slot, exp_avg_sq", "_prefetch", "fused Adam"),
    ),
    Fault(
        name="flushed before it is updated",
        seeded=without_waits_of(ActionKind.FLUSH_STATES),
        block=STREAMED,
        expected=(UNORDERED, "slot, exp_avg_sq", "write on stream 5 by fused Adam", "_flush_states"),
    ),
    # Memory handed to another stream
    Fault(
        name="gradient freed while the reduction reads it",
        seeded=patched(torch.Tensor, "record_stream", nothing),
        block=CPU,
        expected=(FREED, "backward", "freed on default stream", "__add_grad_to_ipg_bucket"),
    ),
    Fault(
        name="gathered partitions freed while they are used",
        seeded=patched(torch.Tensor, "record_stream", nothing),
        block=CPU,
        world_size=2,
        expected=(FREED, "wait", "freed on stream 1", "read on default stream"),
    ),
    Fault(
        name="used before it is gathered",
        seeded=patched(Handle, "wait", waits_for_the_numbers_only),
        block=CPU,
        world_size=2,
        expected=(UNORDERED, "all_gather", "all_gather_into_tensor", "aten::cat"),
    ),
    # DeepSpeed's own waits: the recording sees the whole engine, not our hooks alone
    Fault(
        name="reduced while backward computes",
        seeded=patched(RecordedStream, "wait_stream", nothing),
        block=CPU,
        expected=(UNORDERED, "backward", "write on default stream", "__add_grad_to_ipg_bucket"),
    ),
)


def name_memories(recorder: Recorder, optimizer: DeepOptimizerStates_Stage3) -> None:
    """So that findings speak of the optimizer's memory in its words."""

    def name(tensor: torch.Tensor, words: str) -> None:
        recorder.memory(tensor).name = words

    for index, state in enumerate(optimizer._states):
        for attribute, words in {
            "master": "master",
            "exp_avg": "exp_avg",
            "exp_avg_sq": "exp_avg_sq",
            "grad": "gradient",
            "rounded": "rounded copy",
        }.items():
            # A rounded copy is there for CPU updates only.
            if (tensor := getattr(state, attribute)) is not None:
                name(tensor, f"{words} of sub-group {index}")
        name(state.param, "16-bit parameters")
    for slot in optimizer._executor._actions._slot_of.values():
        for attribute in ("master", "exp_avg", "exp_avg_sq"):
            name(getattr(slot, attribute), f"slot, {attribute}")
    first_parts = optimizer._executor._first_parts
    for tensor, words in ((first_parts._grads, "gradients"), (first_parts._rounded, "rounded copy")):
        if tensor is not None:
            name(tensor, f"{words} of first parts")
    for bucket in optimizer.ipg_buckets.values():
        name(bucket.buffer, "gradient bucket")
