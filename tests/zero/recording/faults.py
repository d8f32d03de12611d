"""Synchronisation taken away, one piece at a time: the recording must show each, or it could not see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.runtime.early_update import FirstParts
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.staging import Staging
from deep_opt_states.zero.internals.coordinator import Coordinator
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.buckets import Buckets
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.gradients import Gradients
from perf_model.schedule.action import ActionKind
from tests.zero.parity.case import CPU, NOT_AHEAD, STREAMED, STREAMED_MANY_SLOTS, STREAMED_ONE_SLOT, Case
from tests.zero.recording.accelerator import RecordedStream
from tests.zero.recording.collectives import Handle
from tests.zero.recording.looks import (
    after_each_step,
    before_each_backward,
    look_at_gathered,
    look_at_kept,
    look_at_masters,
    look_at_moments,
    look_at_parameters,
)
from tests.zero.recording.missing_order import (
    backward_does_not_wait,
    does_not_wait_for_gradients,
    does_not_wait_for_the_worker,
    first_parts_with,
    forward_knows_nothing,
    nothing,
    on_a_stream_of_its_own,
    patched,
    the_same_from_the_fourth_step_on,
    together,
    unguarded,
    update_ends_with_transfers_in_flight,
    waits_for_the_numbers_only,
    without_waits_of,
)
from tests.zero.recording.recorder import FREED, ILLEGAL, UNORDERED, Finding
from tests.zero.recording.writes import write_and_partition, write_gathered, write_partitions
from tests.zero.slots_beyond import FREE, room_for_slots


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``expected`` are the rule, the memory, and a word of each side of one finding that must be there."""

    name: str
    seeded: Callable[[], AbstractContextManager[object]]
    expected: tuple[str, str, str, str]
    block: dict[str, Any]
    world_size: int = 1
    steps: int = 3
    accumulation: int = 1
    uses_of_shared: int = 0
    zero: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return Case(
            name=self.name,
            blocks=(self.block,),
            world_size=self.world_size,
            zero=self.zero,
            accumulation=self.accumulation,
            uses_of_shared=self.uses_of_shared,
            steps=self.steps,
            clip=0.3,
        )

    def shown_by(self, finding: Finding) -> bool:
        rule, memory, one, other = self.expected
        first, second = finding.sides
        either = (one in first and other in second) or (other in first and one in second)
        return finding.rule == rule and memory in finding.memory and either


RESIDENT = {"placement": ["resident"] * 5}
SINGLE_PARAMETER_BUCKETS = {"reduce_bucket_size": 1}
CONTIGUOUS_BUCKETS = {"reduce_bucket_size": 4000, "reduce_scatter": False}
ONE_BUCKET = {"reduce_bucket_size": 100_000}
ROOM_FOR_THE_SHARED_LAYER = {"reduce_bucket_size": 23 * 23 + 23, "reduce_scatter": False}
"""Whatever comes next makes DeepSpeed reduce the bucket."""

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
    # The caller's writes, before the next forward gathers
    Fault(
        name="written by the caller while forward gathers",
        seeded=together(patched(Coordinator, "gather_after_current_stream", nothing), after_each_step(write_gathered)),
        block=CPU,
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "_partition_param", "all_gather_into_tensor"),
    ),
    Fault(
        name="written by the caller while forward, after an update that ended in step(), gathers",
        seeded=together(
            patched(Coordinator, "gather_after_current_stream", nothing), after_each_step(write_and_partition)
        ),
        block=at_once(STREAMED),
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "_partition_param", "all_gather_into_tensor"),
    ),
    Fault(
        name="written by the caller in place while forward gathers",
        seeded=together(
            patched(Coordinator, "gather_after_current_stream", nothing), after_each_step(write_partitions)
        ),
        block=CPU,
        world_size=2,
        expected=(UNORDERED, "16-bit parameters", "mul_", "all_gather_into_tensor"),
    ),
    Fault(
        name="written by the caller in place while backward gathers",
        seeded=together(patched(Gathers, "order_after_caller", nothing), before_each_backward(write_partitions)),
        block=CPU,
        world_size=2,
        zero={"stage3_max_reuse_distance": 0},
        expected=(UNORDERED, "16-bit parameters", "mul_", "_all_gather_dtype"),
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
        expected=(UNORDERED, "gradient of sub-group", "flush", "_cpu_step"),
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
        expected=(UNORDERED, "gradient bucket", "reduced", "__add_grad_to_ipg_bucket"),
    ),
    Fault(
        name="staged late out of a single-parameter bucket",
        # The partition is the gradient itself, which is recorded on the stream that reads it.
        seeded=together(
            on_a_stream_of_its_own(DeepOptimizerStates_Stage3, "partition_grads"),
            patched(torch.Tensor, "record_stream", nothing),
        ),
        block=CPU,
        zero=SINGLE_PARAMETER_BUCKETS,
        expected=(FREED, "backward", "freed on default stream", "reduced"),
    ),
    Fault(
        name="staged into a buffer that is still copied down",
        seeded=patched(Staging, "_wait_until_free", nothing),
        block=CPU,
        expected=(UNORDERED, "staging buffer", "flush", "send"),
    ),
    Fault(
        name="sums brought up through a buffer that is still copied down",
        seeded=patched(Staging, "_wait_until_free", nothing),
        block=CPU,
        accumulation=2,
        zero=ONE_BUCKET,
        expected=(UNORDERED, "staging buffer", "flush", "add_to"),
    ),
    Fault(
        name="sums brought up before they have gone down",
        seeded=patched(Staging, "arrive", nothing),
        block=CPU,
        accumulation=2,
        # One copy a micro-batch: nobody has waited for a buffer by the second.
        zero={**ONE_BUCKET, "sub_group_size": 10**9},
        expected=(UNORDERED, "gradient of sub-group", "flush", "add_to"),
    ),
    # A gradient that arrives again while it is in the bucket
    Fault(
        name="gradient added to while it is copied into the bucket",
        seeded=patched(Buckets, "wait_for_copy", nothing),
        block=CPU,
        uses_of_shared=3,
        zero=CONTIGUOUS_BUCKETS,
        expected=(UNORDERED, "gradient bucket", "__add_grad_to_ipg_bucket", "aten::add_"),
    ),
    Fault(
        name="gradient reduced while autograd adds to it in the bucket",
        seeded=patched(Buckets, "added_to", nothing),
        block=CPU,
        uses_of_shared=3,
        zero=ROOM_FOR_THE_SHARED_LAYER,
        expected=(UNORDERED, "gradient bucket", "aten::add_", "__avg_scatter_contiguous_grads"),
    ),
    # The worker reads what has been copied
    Fault(
        name="gradients copied on a stream that the worker does not know",
        seeded=patched(Gradients, "arrive", nothing),
        block=CPU,
        expected=(UNORDERED, "gradient of sub-group", "flush", "_cpu_step"),
    ),
    Fault(
        name="published before the worker has rounded",
        seeded=without_waits_of(ActionKind.PUBLISH),
        block=CPU,
        expected=(UNORDERED, "rounded copy of sub-group", "_cpu_step", "_publish"),
    ),
    # Parameters that DeepSpeed keeps in host memory
    Fault(
        name="offloaded parameters given to the accelerator's kernel",
        seeded=patched(DeepOptimizerStates_Stage3, "_params_on_host", False),
        block=STREAMED,
        zero={"offload_param": {"device": "cpu"}},
        expected=(ILLEGAL, "16-bit parameters", "param of an update in", "fused Adam"),
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
        name="slot added while what its memory was is in use",
        seeded=together(room_for_slots, patched(Executor, "_lanes_wait_for_caller", nothing)),
        block=STREAMED_ONE_SLOT,
        steps=len(FREE) + 1,
        expected=(UNORDERED, "slots.py", "write on default stream", "_prefetch"),
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
