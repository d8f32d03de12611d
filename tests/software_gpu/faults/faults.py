"""List the seeded faults, each of which takes one wait or one order away, and the check that finds it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.lanes import LaneStreams
from deep_opt_states.zero.guarded_states import GuardedStates
from deep_opt_states.zero.internals.coordinator import Coordinator
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.start import assembly
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.step.buckets import Buckets
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.staging import Staging
from deep_opt_states.zero.step.unit_waits import UnitWaits
from perf_model.schedule.action import ActionKind
from perf_model.schedule.placement import Placement
from tests.software_gpu.faults import accesses
from tests.software_gpu.faults import missing_order as order
from tests.software_gpu.faults.accesses import after_each_step as after
from tests.software_gpu.faults.accesses import before_each_backward
from tests.software_gpu.faults.missing_order import combined, missing, patched
from tests.software_gpu.racecheck import BETWEEN
from tests.zero.parity.case import (
    CPU,
    NO_THROUGHPUT_TIMER,
    RESIDENT,
    STREAMED,
    STREAMED_MANY_SLOTS,
    STREAMED_ONE_SLOT,
    WITHOUT_BACKWARD_OVERLAP,
    Case,
    not_deferred,
)
from tests.zero.random_plans import moves_in_turn


@dataclass(frozen=True)
class Fault:
    """A missing wait, and how it must show.

    ``seeded`` returns the context in which the wait is missing, and ``script`` that in which the user's script makes
    the accesses that the wait is for. ``sides`` hold a part of each of the two accesses that the race check reports, in
    either order. ``refused`` is the error by which a kernel refuses its arguments: then no access shows the fault.
    """

    seeded: Callable[[], AbstractContextManager[object]]
    block: dict[str, Any]
    sides: tuple[str, str] | None
    _: KW_ONLY
    refused: str = ""
    steps: int = 3
    accumulation: int = 1
    uses_of_shared: int = 0
    zero: dict[str, Any] = field(default_factory=dict)
    script: Callable[[], AbstractContextManager[object]] = nullcontext

    def case(self) -> Case:
        """Return the case, which is trained without the timer that waits for the device."""
        return Case(
            name="fault",
            blocks=(self.block,),
            world_size=dist.get_world_size(),
            zero=self.zero,
            accumulation=self.accumulation,
            uses_of_shared=self.uses_of_shared,
            steps=self.steps,
            clip=0.3,
            extra=NO_THROUGHPUT_TIMER,
        )

    def is_shown_by(self, race: str) -> bool:
        assert self.sides is not None
        (one, other), (first, second) = self.sides, race.split(BETWEEN)
        return (one in first and other in second) or (other in first and one in second)


SINGLE_PARAMETER_BUCKETS = {"reduce_bucket_size": 1}
CONTIGUOUS_BUCKETS = {"reduce_bucket_size": 4000, "reduce_scatter": False}
ONE_BUCKET = {"reduce_bucket_size": 100_000}
FULL_WITH_THE_SHARED_LAYER = {"reduce_bucket_size": 23 * 23 + 23, "reduce_scatter": False}
"""A bucket with the exact size of the shared layer: DeepSpeed reduces it before it adds any other gradient."""

NO_PERSISTENT = {"stage3_param_persistence_threshold": 0}
"""No persistent parameters. With some on one rank, the end of DeepSpeed's step waits for the whole device."""


sums_on_the_host = combined(patched(AcceleratorChoice, "fits_accumulators", lambda *_: False))
"""Keep the sums of gradients in host memory, although the device has room for them."""

ALL_GATHER, A_READ = "all_gather_into_tensor", "aten::sum in accesses.py"
MASTERS, PARAMETERS = "fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat"
FLUSH_AND_PREFETCH, PUBLISH_AND_FORWARD = ("_flush_states", "_prefetch"), ("_publish", "forward")
PUBLISH_AND_GATHER, GPU_STEP_AND_GATHER = ("_publish", ALL_GATHER), ("_gpu_step", ALL_GATHER)
not_published, not_recorded = missing(Executor, "publish"), missing(torch.Tensor, "record_stream")


ON_ONE_RANK = {
    # Forward reads the 16-bit parameters, by a gather or directly, after an update that ended in step().
    "update ends without waiting for its streams: forward reads parameters while PUBLISH writes them": Fault(
        order.update_does_not_drain, not_deferred(CPU), PUBLISH_AND_FORWARD
    ),
    "update ends without waiting for its streams: forward reads parameters while GPU_STEP writes them": Fault(
        order.update_does_not_drain, not_deferred(STREAMED), ("_gpu_step", "forward")
    ),
    "update ends without waiting for its streams: the next step prefetches masters during FLUSH_STATES": Fault(
        order.update_does_not_drain,
        {**not_deferred(STREAMED_MANY_SLOTS), "overlap_backward": False},
        FLUSH_AND_PREFETCH,
    ),
    "update ends without waiting for its streams, from the fourth step on": Fault(
        order.update_does_not_drain_from_the_fourth_step_on, not_deferred(CPU), PUBLISH_AND_FORWARD, steps=6
    ),
    # Forward reads them while a deferred update is in flight.
    "forward does not wait for PUBLISH of a deferred update": Fault(
        combined(not_published, order.worker_begins_after_the_step), CPU, PUBLISH_AND_FORWARD
    ),
    "forward does not wait for GPU_STEP of a deferred update": Fault(not_published, STREAMED, ("_gpu_step", "forward")),
    "readers of persistent parameters do not wait until they are published": Fault(
        missing(UnitWaits, "publish_persistent_unit"), CPU, ("_publish", A_READ), script=after(accesses.read_persistent)
    ),
    # Flushes are in flight during backward.
    "prefetches do not wait for flushes: backward prefetches into a slot while FLUSH_STATES reads it": Fault(
        order.prefetches_do_not_wait, STREAMED, FLUSH_AND_PREFETCH
    ),
    "prefetches do not wait for flushes: backward prefetches masters while FLUSH_STATES writes them": Fault(
        order.prefetches_do_not_wait, STREAMED_MANY_SLOTS, FLUSH_AND_PREFETCH
    ),
    "backward does not wait for the update: it prefetches into a slot while FLUSH_STATES reads it": Fault(
        order.backward_does_not_wait, STREAMED, FLUSH_AND_PREFETCH
    ),
    # The next two faults need two missing waits each: forward's waits already order the readers of the gradients.
    "neither forward nor backward waits for the worker, which reads the gradients that backward overwrites": Fault(
        combined(order.forward_does_not_wait, order.backward_does_not_wait), CPU, ("flush", "_cpu_step")
    ),
    "neither forward nor backward waits for GPU_STEP, which reads the gradients that backward accumulates": Fault(
        combined(not_published, order.backward_does_not_wait), STREAMED, ("_add", "_gpu_step")
    ),
    # No reader of states or parameters sees an update in flight.
    "readers of masters do not wait for the worker": Fault(
        order.readers_do_not_wait(MASTERS), CPU, ("_cpu_step", A_READ), script=after(accesses.read_masters)
    ),
    "readers of masters do not wait for FLUSH_STATES": Fault(
        order.readers_do_not_wait(MASTERS), STREAMED, ("_flush_states", A_READ), script=after(accesses.read_masters)
    ),
    "readers of moments do not wait for FLUSH_STATES": Fault(
        patched(GuardedStates, "state", DeepSpeedZeroOptimizer_Stage3.state),
        STREAMED,
        ("_flush_states", A_READ),
        script=after(accesses.read_moments),
    ),
    "readers of 16-bit parameters do not wait for PUBLISH": Fault(
        order.readers_do_not_wait(PARAMETERS), CPU, ("_publish", A_READ), script=after(accesses.read_parameters)
    ),
    # Gradients are staged before the bucket is filled again.
    "the reduction does not wait until the bucket is staged": Fault(
        order.on_an_unawaited_stream(Gradients, "add_reduced_bucket"),
        CPU,
        ("add_reduced_bucket", "__add_grad_to_ipg_bucket"),
        zero=CONTIGUOUS_BUCKETS,
    ),
    # Here the partition is the gradient itself, which stays safe if it is recorded on the stream that reads it.
    "backward does not wait until a single-parameter bucket is staged, and its gradient is not recorded": Fault(
        combined(order.on_an_unawaited_stream(DeepOptimizerStates_Stage3, "partition_grads"), not_recorded),
        CPU,
        ("add_reduced_bucket", "next owner"),
        zero=SINGLE_PARAMETER_BUCKETS,
    ),
    "staging does not wait until its buffer is copied to the host": Fault(
        missing(Staging, "_wait_until_free"), CPU, ("flush", "send")
    ),
    "accumulation does not wait until its staging buffer is copied to the host": Fault(
        missing(Staging, "_wait_until_free"),
        CPU,
        ("flush", "add_to"),
        accumulation=2,
        script=sums_on_the_host,
        zero=ONE_BUCKET,
    ),
    # With one copy per micro-batch, no wait for a free buffer orders the second micro-batch.
    "accumulation does not wait until the sums are copied to the host": Fault(
        missing(Staging, "wait_for_copies"),
        CPU,
        ("flush", "add_to"),
        accumulation=2,
        script=sums_on_the_host,
        zero={**ONE_BUCKET, **NO_PERSISTENT, "sub_group_size": 10**9},
    ),
    # Autograd adds to a gradient that is in the bucket already.
    "autograd does not wait until the gradient that it adds to is copied into the bucket": Fault(
        missing(Buckets, "wait_for_copy"),
        CPU,
        ("__add_grad_to_ipg_bucket", "aten::add_"),
        uses_of_shared=3,
        zero=CONTIGUOUS_BUCKETS,
    ),
    "the reduction does not wait until autograd has added to a gradient in the bucket": Fault(
        missing(Buckets, "wait_for_addition"),
        CPU,
        ("aten::add_", "__avg_scatter_contiguous_grads"),
        uses_of_shared=3,
        zero=FULL_WITH_THE_SHARED_LAYER,
    ),
    # The worker reads gradients that are copied to the host, and rounds parameters that are then published.
    "the worker does not wait until the gradients are copied to the host": Fault(
        missing(Gradients, "wait_for_copies"), CPU, ("flush", "_cpu_step")
    ),
    "PUBLISH does not wait for the worker": Fault(
        order.actions_do_not_wait(ActionKind.PUBLISH), CPU, ("_cpu_step", "_publish")
    ),
    # DeepSpeed keeps offloaded parameters in host memory.
    "offloaded parameters are passed to the accelerator's kernel": Fault(
        patched(assembly, "_params_on_host", lambda *_: False),
        STREAMED,
        None,
        zero={"offload_param": {"device": "cpu"}},
        refused="AssertionError: ('param', device(type='cpu'))",
    ),
    # Slots are filled, updated and flushed in this order.
    # Without any wait, all states would be prefetched in backward.
    "PREFETCH does not wait for FLUSH_STATES of its slot": Fault(
        order.actions_do_not_wait(ActionKind.PREFETCH),
        {**STREAMED_ONE_SLOT, **WITHOUT_BACKWARD_OVERLAP},
        FLUSH_AND_PREFETCH,
    ),
    # A move makes the host wait for the default stream, whose kernels used the memory, when it copies gradients.
    "PREFETCH into a new slot does not wait for the stream that used its memory": Fault(
        missing(LaneStreams, "wait_for_new_memory"),
        STREAMED_ONE_SLOT,
        ("last owner of memory", "_prefetch"),
        script=moves_in_turn((Placement.STREAMED, 300), (Placement.STREAMED, 700)),
    ),
    "GPU_STEP does not wait for PREFETCH": Fault(
        order.actions_do_not_wait(ActionKind.GPU_STEP), STREAMED, ("_prefetch", "_gpu_step")
    ),
    "GPU_STEP does not wait for PREFETCH of the moments": Fault(
        order.actions_do_not_wait(ActionKind.GPU_STEP), STREAMED, ("_prefetch", "GPU Adam")
    ),
    "FLUSH_STATES does not wait for GPU_STEP": Fault(
        order.actions_do_not_wait(ActionKind.FLUSH_STATES), STREAMED, ("GPU Adam", "_flush_states")
    ),
    # Resident states are loaded before their first update, and written back before others read them.
    # Without them, nothing else is waited for in the step.
    "GPU_STEP does not wait until resident states are loaded": Fault(
        order.resident_states_with(order.compute_does_not_wait_for_the_load),
        RESIDENT,
        ("load", "_gpu_step"),
        zero=NO_PERSISTENT,
    ),
    "readers of masters do not wait until resident states are written back": Fault(
        order.resident_states_with(order.does_not_wait_for_the_write_back),
        RESIDENT,
        ("write_back", A_READ),
        script=after(accesses.read_masters),
    ),
    # Units move between steps.
    # The executor also waits for its streams when it gets other units.
    # Without them, nothing else is waited for in the step.
    "a move does not wait until resident states are written back, which the CPU updates from then on": Fault(
        combined(order.resident_states_with(order.does_not_wait_for_the_write_back), order.update_does_not_drain),
        RESIDENT,
        ("write_back", "_cpu_step"),
        script=moves_in_turn((Placement.RESIDENT, 10**9), (Placement.CPU, 300)),
        steps=4,
        zero=NO_PERSISTENT,
    ),
    "forward waits for the units that held the parameters before a move": Fault(
        order.gathers_keep_their_first_units,
        CPU,
        PUBLISH_AND_FORWARD,
        script=moves_in_turn((Placement.CPU, 10**9), (Placement.CPU, 300)),
        steps=5,
    ),
    # Memory is used by another stream than the one that it was allocated on.
    "a gradient is not recorded on the stream that reduces it": Fault(
        not_recorded, CPU, ("__add_grad_to_ipg_bucket", "next owner")
    ),
    # DeepSpeed's own waits: the race detector checks the whole engine, and not only our hooks.
    "the reduction does not wait for backward": Fault(
        order.streams_do_not_wait_for_streams, CPU, ("write on the default stream", "__add_grad_to_ipg_bucket")
    ),
}
ON_TWO_RANKS = {
    "update ends without waiting for its streams: the all-gather reads parameters while PUBLISH writes them": Fault(
        order.update_does_not_drain, not_deferred(CPU), PUBLISH_AND_GATHER
    ),
    "update ends without waiting for its streams: the all-gather reads parameters while GPU_STEP writes them": Fault(
        order.update_does_not_drain, not_deferred(STREAMED), GPU_STEP_AND_GATHER
    ),
    "the all-gather does not wait for PUBLISH of a deferred update": Fault(
        combined(not_published, order.worker_begins_after_the_step), CPU, PUBLISH_AND_GATHER
    ),
    "the all-gather does not wait for GPU_STEP of a deferred update": Fault(
        not_published, STREAMED, GPU_STEP_AND_GATHER, zero=NO_PERSISTENT
    ),
    "a user's gather does not wait for a deferred update": Fault(
        missing(Gathers, "_finish_update"),
        STREAMED,
        GPU_STEP_AND_GATHER,
        script=after(accesses.read_gathered),
        zero=NO_PERSISTENT,
    ),
    # The caller writes parameters before the next forward gathers them.
    "forward's all-gather does not wait for a write in GatheredParameters": Fault(
        missing(Coordinator, "gather_after_current_stream"),
        CPU,
        ("_partition_param", ALL_GATHER),
        script=after(accesses.write_gathered),
    ),
    "forward's all-gather does not wait for a write in partition(), after an update that ended in step()": Fault(
        missing(Coordinator, "gather_after_current_stream"),
        not_deferred(STREAMED),
        ("_partition_param", ALL_GATHER),
        script=after(accesses.write_and_partition),
    ),
    # A write that bypasses DeepSpeed's interfaces does not wait for a deferred update.
    "forward's all-gather does not wait for a write to a partition in place": Fault(
        missing(Coordinator, "gather_after_current_stream"),
        not_deferred(CPU),
        ("mul_", "_all_gather_dtype"),
        script=after(accesses.write_partitions),
    ),
    # Without prefetches, since forward could prefetch parameters of backward before the write.
    "backward's all-gather does not wait for a write to a partition in place": Fault(
        missing(Gathers, "order_after_caller"),
        CPU,
        ("mul_", "_all_gather_dtype"),
        script=before_each_backward(accesses.write_partitions),
        zero={"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
    ),
    # Persistent parameters are updated and published before step() returns.
    "the gather in step() does not wait until the persistent unit is published": Fault(
        missing(UnitWaits, "publish_persistent_unit"), CPU, PUBLISH_AND_GATHER
    ),
    "gathered partitions are not recorded on the stream that uses them": Fault(
        not_recorded, CPU, ("read on the default stream", "next owner")
    ),
    "users of gathered parameters do not wait for the all-gather": Fault(
        order.all_gathers_are_not_awaited, CPU, (ALL_GATHER, "aten::cat")
    ),
}
FAULTS: dict[int, dict[str, Fault]] = {1: ON_ONE_RANK, 2: ON_TWO_RANKS}
