"""List the seeded faults, each of which takes one wait or one order away, and the check that finds it.

The race check must report the two accesses, and an adversary of the device must turn the fault into a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
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
from tests.software_gpu.faults.adversaries import LAZY, LAZY_COPIES_TO_THE_HOST, LAZY_SIDE_STREAMS, LAZY_WORKER
from tests.software_gpu.faults.missing_order import (
    actions_do_not_wait,
    all_gathers_are_not_awaited,
    backward_does_not_wait,
    combined,
    compute_does_not_wait_for_the_load,
    do_nothing,
    does_not_wait_for_the_write_back,
    forward_does_not_wait,
    gathers_keep_their_first_units,
    on_an_unawaited_stream,
    patched,
    prefetches_do_not_wait_for_flushes,
    readers_do_not_wait,
    resident_states_with,
    streams_do_not_wait_for_streams,
    update_does_not_wait_for_its_streams,
    update_does_not_wait_for_its_streams_from_the_fourth_step_on,
    worker_begins_after_the_step,
)
from tests.software_gpu.faults.reads_between_steps import (
    after_each_step,
    before_each_backward,
    read_gathered,
    read_masters,
    read_moments,
    read_parameters,
    read_persistent,
)
from tests.software_gpu.faults.writes_between_steps import write_and_partition, write_gathered, write_partitions
from tests.software_gpu.racecheck import BETWEEN
from tests.zero.moves.random_plans import moves_in_turn
from tests.zero.parity.case import (
    CPU,
    RESIDENT,
    STREAMED,
    STREAMED_MANY_SLOTS,
    STREAMED_ONE_SLOT,
    WITHOUT_BACKWARD_OVERLAP,
    Case,
    not_deferred,
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A missing wait, and how it must show.

    ``seeded`` returns the context in which the wait is missing, and ``script`` that in which the user's script makes
    the accesses that the wait is for. ``sides`` hold a part of each of the two accesses that the race check reports, in
    either order. ``adversary`` names one in which a number is wrong, None if the device hides the fault. ``refused`` is
    the error by which a kernel refuses its arguments: then neither the check nor a number shows the fault.
    """

    name: str
    seeded: Callable[[], AbstractContextManager[object]]
    sides: tuple[str, str] | None
    block: dict[str, Any]
    adversary: str | None = LAZY
    refused: str = ""
    world_size: int = 1
    steps: int = 3
    accumulation: int = 1
    uses_of_shared: int = 0
    zero: dict[str, Any] = field(default_factory=dict)
    script: Callable[[], AbstractContextManager[object]] = nullcontext

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

    def is_shown_by(self, race: str) -> bool:
        """Return whether ``race`` is between the expected accesses."""
        assert self.sides is not None
        (one, other), (first, second) = self.sides, race.split(BETWEEN)
        return (one in first and other in second) or (other in first and one in second)


SINGLE_PARAMETER_BUCKETS = {"reduce_bucket_size": 1}
CONTIGUOUS_BUCKETS = {"reduce_bucket_size": 4000, "reduce_scatter": False}
ONE_BUCKET = {"reduce_bucket_size": 100_000}
FULL_WITH_THE_SHARED_LAYER = {"reduce_bucket_size": 23 * 23 + 23, "reduce_scatter": False}
"""A bucket with the exact size of the shared layer: DeepSpeed reduces it before it adds any other gradient."""

NO_PERSISTENT_PARAMETERS = {"stage3_param_persistence_threshold": 0}
"""Without persistent parameters DeepSpeed does not synchronize the whole device at the end of its step.

It does so with several ranks, when it gathers them.
"""


@contextmanager
def sums_on_the_host() -> Iterator[None]:
    """Keep the sums of gradients in host memory, although the device has room for them."""
    with patched(AcceleratorChoice, "fits_accumulators", lambda *_: False)():
        yield


FAULTS = (
    # Forward reads the 16-bit parameters, by a gather or directly, after an update that ended in step().
    Fault(
        name="update ends without waiting for its streams: forward reads parameters while PUBLISH writes them",
        seeded=update_does_not_wait_for_its_streams,
        block=not_deferred(CPU),
        sides=("_publish", "forward"),
    ),
    Fault(
        name="update ends without waiting for its streams: forward reads parameters while GPU_STEP writes them",
        seeded=update_does_not_wait_for_its_streams,
        block=not_deferred(STREAMED),
        sides=("_gpu_step", "forward"),
    ),
    Fault(
        name="update ends without waiting for its streams: the all-gather reads parameters while PUBLISH writes them",
        seeded=update_does_not_wait_for_its_streams,
        block=not_deferred(CPU),
        world_size=2,
        sides=("_publish", "all_gather_into_tensor"),
    ),
    Fault(
        name="update ends without waiting for its streams: the all-gather reads parameters while GPU_STEP writes them",
        seeded=update_does_not_wait_for_its_streams,
        block=not_deferred(STREAMED),
        world_size=2,
        sides=("_gpu_step", "all_gather_into_tensor"),
    ),
    Fault(
        name="update ends without waiting for its streams: the next step prefetches masters during FLUSH_STATES",
        seeded=update_does_not_wait_for_its_streams,
        block={**not_deferred(STREAMED_MANY_SLOTS), "overlap_backward": False},
        sides=("_flush_states", "_prefetch"),
    ),
    Fault(
        name="update ends without waiting for its streams, from the fourth step on",
        seeded=update_does_not_wait_for_its_streams_from_the_fourth_step_on,
        block=not_deferred(CPU),
        steps=6,
        sides=("_publish", "forward"),
    ),
    # Forward reads them while a deferred update is in flight.
    Fault(
        name="forward does not wait for PUBLISH of a deferred update",
        seeded=combined(patched(Executor, "publish", do_nothing), worker_begins_after_the_step),
        block=CPU,
        sides=("_publish", "forward"),
        adversary=LAZY_SIDE_STREAMS,
    ),
    Fault(
        name="forward does not wait for GPU_STEP of a deferred update",
        seeded=patched(Executor, "publish", do_nothing),
        block=STREAMED,
        sides=("_gpu_step", "forward"),
        adversary=LAZY_SIDE_STREAMS,
    ),
    Fault(
        name="the all-gather does not wait for PUBLISH of a deferred update",
        seeded=combined(patched(Executor, "publish", do_nothing), worker_begins_after_the_step),
        block=CPU,
        world_size=2,
        sides=("_publish", "all_gather_into_tensor"),
    ),
    Fault(
        name="the all-gather does not wait for GPU_STEP of a deferred update",
        seeded=patched(Executor, "publish", do_nothing),
        block=STREAMED,
        world_size=2,
        zero=NO_PERSISTENT_PARAMETERS,
        sides=("_gpu_step", "all_gather_into_tensor"),
    ),
    Fault(
        name="a user's gather does not wait for a deferred update",
        seeded=patched(Gathers, "_finish_update", do_nothing),
        script=after_each_step(read_gathered),
        block=STREAMED,
        world_size=2,
        zero=NO_PERSISTENT_PARAMETERS,
        sides=("_gpu_step", "all_gather_into_tensor"),
    ),
    # The caller writes parameters before the next forward gathers them.
    Fault(
        name="forward's all-gather does not wait for a write in GatheredParameters",
        seeded=patched(Coordinator, "gather_after_current_stream", do_nothing),
        script=after_each_step(write_gathered),
        block=CPU,
        world_size=2,
        sides=("_partition_param", "all_gather_into_tensor"),
    ),
    Fault(
        name="forward's all-gather does not wait for a write in partition(), after an update that ended in step()",
        seeded=patched(Coordinator, "gather_after_current_stream", do_nothing),
        script=after_each_step(write_and_partition),
        block=not_deferred(STREAMED),
        world_size=2,
        sides=("_partition_param", "all_gather_into_tensor"),
    ),
    Fault(
        name="forward's all-gather does not wait for a write to a partition in place",
        seeded=patched(Coordinator, "gather_after_current_stream", do_nothing),
        script=after_each_step(write_partitions),
        # A write that bypasses DeepSpeed's interfaces does not wait for a deferred update.
        block=not_deferred(CPU),
        world_size=2,
        sides=("mul_", "_all_gather_dtype"),
    ),
    Fault(
        name="backward's all-gather does not wait for a write to a partition in place",
        seeded=patched(Gathers, "order_after_caller", do_nothing),
        script=before_each_backward(write_partitions),
        block=CPU,
        world_size=2,
        # Without prefetches, since forward could prefetch parameters of backward before the write.
        zero={"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
        sides=("mul_", "_all_gather_dtype"),
    ),
    # Persistent parameters are updated and published before step() returns.
    Fault(
        name="the gather in step() does not wait until the persistent unit is published",
        seeded=patched(UnitWaits, "publish_persistent_unit", do_nothing),
        block=CPU,
        world_size=2,
        sides=("_publish", "all_gather_into_tensor"),
    ),
    Fault(
        name="readers of persistent parameters do not wait until they are published",
        seeded=patched(UnitWaits, "publish_persistent_unit", do_nothing),
        script=after_each_step(read_persistent),
        block=CPU,
        sides=("_publish", "aten::sum in reads_between_steps.py"),
    ),
    # Flushes are in flight during backward.
    Fault(
        name="prefetches do not wait for flushes: backward prefetches into a slot while FLUSH_STATES reads it",
        seeded=prefetches_do_not_wait_for_flushes,
        block=STREAMED,
        sides=("_flush_states", "_prefetch"),
        adversary=LAZY_COPIES_TO_THE_HOST,
    ),
    Fault(
        name="prefetches do not wait for flushes: backward prefetches masters while FLUSH_STATES writes them",
        seeded=prefetches_do_not_wait_for_flushes,
        block=STREAMED_MANY_SLOTS,
        sides=("_flush_states", "_prefetch"),
        adversary=LAZY_COPIES_TO_THE_HOST,
    ),
    Fault(
        name="backward does not wait for the update: it prefetches into a slot while FLUSH_STATES reads it",
        seeded=backward_does_not_wait,
        block=STREAMED,
        sides=("_flush_states", "_prefetch"),
        adversary=LAZY_COPIES_TO_THE_HOST,
    ),
    # The next two faults need two missing waits each: forward's waits already order the readers of the gradients.
    Fault(
        name="neither forward nor backward waits for the worker, which reads the gradients that backward overwrites",
        seeded=combined(forward_does_not_wait, backward_does_not_wait),
        block=CPU,
        sides=("flush", "_cpu_step"),
        adversary=LAZY_WORKER,
    ),
    Fault(
        name="neither forward nor backward waits for GPU_STEP, which reads the gradients that backward accumulates",
        seeded=combined(patched(Executor, "publish", do_nothing), backward_does_not_wait),
        block=STREAMED,
        sides=("_add", "_gpu_step"),
    ),
    # No reader of states or parameters sees an update in flight.
    Fault(
        name="readers of masters do not wait for the worker",
        seeded=readers_do_not_wait("fp32_partitioned_groups_flat"),
        script=after_each_step(read_masters),
        block=CPU,
        sides=("_cpu_step", "aten::sum in reads_between_steps.py"),
        adversary=LAZY_WORKER,
    ),
    Fault(
        name="readers of masters do not wait for FLUSH_STATES",
        seeded=readers_do_not_wait("fp32_partitioned_groups_flat"),
        script=after_each_step(read_masters),
        block=STREAMED,
        sides=("_flush_states", "aten::sum in reads_between_steps.py"),
    ),
    Fault(
        name="readers of moments do not wait for FLUSH_STATES",
        seeded=patched(GuardedStates, "state", DeepSpeedZeroOptimizer_Stage3.state),
        script=after_each_step(read_moments),
        block=STREAMED,
        sides=("_flush_states", "aten::sum in reads_between_steps.py"),
    ),
    Fault(
        name="readers of 16-bit parameters do not wait for PUBLISH",
        seeded=readers_do_not_wait("fp16_partitioned_groups_flat"),
        script=after_each_step(read_parameters),
        block=CPU,
        sides=("_publish", "aten::sum in reads_between_steps.py"),
    ),
    # Gradients are staged before the bucket is filled again.
    Fault(
        name="the reduction does not wait until the bucket is staged",
        seeded=on_an_unawaited_stream(Gradients, "add_reduced_bucket"),
        block=CPU,
        zero=CONTIGUOUS_BUCKETS,
        sides=("add_reduced_bucket", "__add_grad_to_ipg_bucket"),
    ),
    Fault(
        name="backward does not wait until a single-parameter bucket is staged, and its gradient is not recorded",
        # Here the partition is the gradient itself, which stays safe if it is recorded on the stream that reads it.
        seeded=combined(
            on_an_unawaited_stream(DeepOptimizerStates_Stage3, "partition_grads"),
            patched(torch.Tensor, "record_stream", do_nothing),
        ),
        block=CPU,
        zero=SINGLE_PARAMETER_BUCKETS,
        sides=("add_reduced_bucket", "next owner"),
    ),
    Fault(
        name="staging does not wait until its buffer is copied to the host",
        seeded=patched(Staging, "_wait_until_free", do_nothing),
        block=CPU,
        sides=("flush", "send"),
    ),
    Fault(
        name="accumulation does not wait until its staging buffer is copied to the host",
        seeded=patched(Staging, "_wait_until_free", do_nothing),
        block=CPU,
        accumulation=2,
        script=sums_on_the_host,
        zero=ONE_BUCKET,
        sides=("flush", "add_to"),
    ),
    Fault(
        name="accumulation does not wait until the sums are copied to the host",
        seeded=patched(Staging, "wait_for_copies", do_nothing),
        block=CPU,
        accumulation=2,
        script=sums_on_the_host,
        # With one copy per micro-batch, no wait for a free buffer orders the second micro-batch.
        zero={**ONE_BUCKET, **NO_PERSISTENT_PARAMETERS, "sub_group_size": 10**9},
        sides=("flush", "add_to"),
    ),
    # Autograd adds to a gradient that is in the bucket already.
    Fault(
        name="autograd does not wait until the gradient that it adds to is copied into the bucket",
        seeded=patched(Buckets, "wait_for_copy", do_nothing),
        block=CPU,
        uses_of_shared=3,
        zero=CONTIGUOUS_BUCKETS,
        sides=("__add_grad_to_ipg_bucket", "aten::add_"),
        adversary=LAZY_SIDE_STREAMS,
    ),
    Fault(
        name="the reduction does not wait until autograd has added to a gradient in the bucket",
        seeded=patched(Buckets, "wait_for_addition", do_nothing),
        block=CPU,
        uses_of_shared=3,
        zero=FULL_WITH_THE_SHARED_LAYER,
        sides=("aten::add_", "__avg_scatter_contiguous_grads"),
    ),
    # The worker reads gradients that are copied to the host, and rounds parameters that are then published.
    Fault(
        name="the worker does not wait until the gradients are copied to the host",
        seeded=patched(Gradients, "wait_for_copies", do_nothing),
        block=CPU,
        sides=("flush", "_cpu_step"),
    ),
    Fault(
        name="PUBLISH does not wait for the worker",
        seeded=actions_do_not_wait(ActionKind.PUBLISH),
        block=CPU,
        sides=("_cpu_step", "_publish"),
        adversary=LAZY_WORKER,
    ),
    # DeepSpeed keeps offloaded parameters in host memory.
    Fault(
        name="offloaded parameters are passed to the accelerator's kernel",
        seeded=patched(assembly, "_params_on_host", lambda *_: False),
        block=STREAMED,
        zero={"offload_param": {"device": "cpu"}},
        sides=None,
        refused="AssertionError: ('param', device(type='cpu'))",
        adversary=None,
    ),
    # Slots are filled, updated and flushed in this order.
    Fault(
        name="PREFETCH does not wait for FLUSH_STATES of its slot",
        seeded=actions_do_not_wait(ActionKind.PREFETCH),
        # Without any wait, all states would be prefetched in backward.
        block={**STREAMED_ONE_SLOT, **WITHOUT_BACKWARD_OVERLAP},
        sides=("_flush_states", "_prefetch"),
    ),
    Fault(
        name="PREFETCH into a new slot does not wait for the stream that used its memory",
        seeded=patched(LaneStreams, "wait_for_new_memory", do_nothing),
        script=moves_in_turn((Placement.STREAMED, 300), (Placement.STREAMED, 700)),
        block=STREAMED_ONE_SLOT,
        sides=("last owner of memory", "_prefetch"),
        # A move makes the host wait for the default stream, whose kernels used the memory, when it copies gradients.
        adversary=None,
    ),
    Fault(
        name="GPU_STEP does not wait for PREFETCH",
        seeded=actions_do_not_wait(ActionKind.GPU_STEP),
        block=STREAMED,
        sides=("_prefetch", "_gpu_step"),
    ),
    Fault(
        name="GPU_STEP does not wait for PREFETCH of the moments",
        seeded=actions_do_not_wait(ActionKind.GPU_STEP),
        block=STREAMED,
        sides=("_prefetch", "GPU Adam"),
    ),
    Fault(
        name="FLUSH_STATES does not wait for GPU_STEP",
        seeded=actions_do_not_wait(ActionKind.FLUSH_STATES),
        block=STREAMED,
        sides=("GPU Adam", "_flush_states"),
    ),
    # Resident states are loaded before their first update, and written back before others read them.
    Fault(
        name="GPU_STEP does not wait until resident states are loaded",
        seeded=lambda: resident_states_with(compute_does_not_wait_for_the_load),
        block=RESIDENT,
        # Without them, nothing else is waited for in the step.
        zero=NO_PERSISTENT_PARAMETERS,
        sides=("load", "_gpu_step"),
    ),
    Fault(
        name="readers of masters do not wait until resident states are written back",
        seeded=lambda: resident_states_with(does_not_wait_for_the_write_back),
        script=after_each_step(read_masters),
        block=RESIDENT,
        sides=("write_back", "aten::sum in reads_between_steps.py"),
    ),
    # Units move between steps.
    Fault(
        name="a move does not wait until resident states are written back, which the CPU updates from then on",
        # The executor waits for its streams, too, when it gets other units.
        seeded=combined(
            lambda: resident_states_with(does_not_wait_for_the_write_back), update_does_not_wait_for_its_streams
        ),
        script=moves_in_turn((Placement.RESIDENT, 10**9), (Placement.CPU, 300)),
        block=RESIDENT,
        steps=4,
        # Without them, nothing else is waited for in the step.
        zero=NO_PERSISTENT_PARAMETERS,
        sides=("write_back", "_cpu_step"),
    ),
    Fault(
        name="forward waits for the units that held the parameters before a move",
        seeded=gathers_keep_their_first_units,
        script=moves_in_turn((Placement.CPU, 10**9), (Placement.CPU, 300)),
        block=CPU,
        steps=5,
        sides=("_publish", "forward"),
        adversary=LAZY_WORKER,
    ),
    # Memory is used by another stream than the one that it was allocated on.
    Fault(
        name="a gradient is not recorded on the stream that reduces it",
        seeded=patched(torch.Tensor, "record_stream", do_nothing),
        block=CPU,
        sides=("__add_grad_to_ipg_bucket", "next owner"),
        adversary=LAZY_SIDE_STREAMS,
    ),
    Fault(
        name="gathered partitions are not recorded on the stream that uses them",
        seeded=patched(torch.Tensor, "record_stream", do_nothing),
        block=CPU,
        world_size=2,
        sides=("read on the default stream", "next owner"),
    ),
    Fault(
        name="users of gathered parameters do not wait for the all-gather",
        seeded=all_gathers_are_not_awaited,
        block=CPU,
        world_size=2,
        sides=("all_gather_into_tensor", "aten::cat"),
    ),
    # DeepSpeed's own waits: the race detector checks the whole engine, and not only our hooks.
    Fault(
        name="the reduction does not wait for backward",
        seeded=streams_do_not_wait_for_streams,
        block=CPU,
        sides=("write on the default stream", "__add_grad_to_ipg_bucket"),
    ),
)
