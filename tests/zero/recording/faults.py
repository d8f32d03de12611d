"""Synchronisation taken away, one piece at a time: the recording must show each, or it could not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.runtime import executor
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.gradients import Gradients
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from perf_model.action import ActionKind
from perf_model.plan import UpdatePlan
from tests.zero.parity.case import CPU, STREAMED, STREAMED_MANY_SLOTS, STREAMED_ONE_SLOT, Case
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


step_returns_with_transfers_in_flight = patched(Executor, "_drain_streams", nothing)


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


SINGLE_PARAMETER_BUCKETS = {"reduce_bucket_size": 1}
CONTIGUOUS_BUCKETS = {"reduce_bucket_size": 4000, "reduce_scatter": False}

FAULTS = (
    # The 16-bit parameters, before the gather that reads them and before a direct use
    Fault(
        name="published while the next forward reads the flat buffer",
        seeded=step_returns_with_transfers_in_flight,
        block=CPU,
        expected=(UNORDERED, "16-bit parameters", "_publish", "forward"),
    ),
    Fault(
        name="updated on the accelerator while the next forward reads the flat buffer",
        seeded=step_returns_with_transfers_in_flight,
        block=STREAMED,
        expected=(UNORDERED, "16-bit parameters", "_gpu_step", "forward"),
    ),
    Fault(
        name="published while the all-gather reads",
        seeded=step_returns_with_transfers_in_flight,
        block=CPU,
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "_publish", "all_gather_into_tensor"),
    ),
    Fault(
        name="updated on the accelerator while the all-gather reads",
        seeded=step_returns_with_transfers_in_flight,
        block=STREAMED,
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "_gpu_step", "all_gather_into_tensor"),
    ),
    Fault(
        name="flushed while the next step prefetches",
        seeded=step_returns_with_transfers_in_flight,
        block=STREAMED_MANY_SLOTS,
        expected=(UNORDERED, "master of sub-group", "_flush_states", "_prefetch"),
    ),
    Fault(
        name="published late, but not at first",
        seeded=the_same_from_the_fourth_step_on,
        block=CPU,
        steps=6,
        expected=(UNORDERED, "16-bit parameters", "_publish", "forward"),
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
        seeded=on_a_stream_of_its_own(Gradients, "_send"),
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
        block=STREAMED_ONE_SLOT,
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
        expected=(UNORDERED, "slot, exp_avg_sq", "write on stream 4 by fused Adam", "_flush_states"),
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
    for slot in optimizer._executor._slots.values():
        for attribute in ("master", "exp_avg", "exp_avg_sq"):
            name(getattr(slot, attribute), f"slot, {attribute}")
    for bucket in optimizer.ipg_buckets.values():
        name(bucket.buffer, "gradient bucket")
