"""Name the adversary in which each fault gives wrong numbers. All that are not named here do so in ``LAZY``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch.distributed as dist

from deep_opt_states.zero.step.gradients import Gradients
from tests.software_gpu import device
from tests.software_gpu.accelerator import SoftwareAccelerator
from tests.software_gpu.faults.adversaries import (
    LAZY_COPIES_TO_THE_HOST,
    LAZY_KERNELS_WITHOUT_FREE_MEMORY,
    LAZY_SIDE_STREAMS,
    LAZY_WORKER,
)
from tests.software_gpu.process_group import SoftwareProcessGroup, SoftwareWork
from tests.zero.races.missing_order import on_an_unawaited_stream, patched

SHOWN_IN = {
    # The default stream reads parameters or adds to gradients too early, and everything else is late.
    "forward does not wait for PUBLISH of a deferred update": LAZY_SIDE_STREAMS,
    "forward does not wait for GPU_STEP of a deferred update": LAZY_SIDE_STREAMS,
    "autograd does not wait until the gradient that it adds to is copied into the bucket": LAZY_SIDE_STREAMS,
    # The default stream reuses memory while the reduction is late.
    "a gradient is not recorded on the stream that reduces it": LAZY_SIDE_STREAMS,
    # The host or a copy reads values that the worker has not written yet.
    "readers of masters do not wait for the worker": LAZY_WORKER,
    "neither forward nor backward waits for the worker, which reads the gradients that backward overwrites": (
        LAZY_WORKER
    ),
    "PUBLISH does not wait for the worker": LAZY_WORKER,
    # The slot's memory must have been used just before, and its last kernels must be late.
    "PREFETCH into a new slot does not wait for the stream that used its memory": LAZY_KERNELS_WITHOUT_FREE_MEMORY,
    "forward waits for the units that held the parameters before a move": LAZY_WORKER,
    # Backward prefetches at once. Later, the update of the persistent unit waits for the gradients, and so for flushes.
    "prefetches do not wait for flushes: backward prefetches into a slot while FLUSH_STATES reads it": (
        LAZY_COPIES_TO_THE_HOST
    ),
    "prefetches do not wait for flushes: backward prefetches masters while FLUSH_STATES writes them": (
        LAZY_COPIES_TO_THE_HOST
    ),
    "backward does not wait for the update: it prefetches into a slot while FLUSH_STATES reads it": (
        LAZY_COPIES_TO_THE_HOST
    ),
}

HIDDEN = {"PREFETCH into a new slot does not wait for the stream that used its memory"}
"""The faults that the device hides. A move makes the host wait for the default stream, whose kernels used the memory,
when it copies gradients. The recording accelerator counts only the waits that order the accesses."""


class IndependentStream(device.Stream):
    """A stream that waits for no other stream."""

    def wait_stream(self, stream: Any) -> None:
        """Replace the wait."""


class UnawaitedWork(SoftwareWork):
    """The handle of a collective that no stream waits for."""

    def wait(self, *_: Any) -> bool:
        return True


def all_gathers_are_not_awaited() -> AbstractContextManager[object]:
    run = SoftwareProcessGroup._run

    def run_unawaited(self: SoftwareProcessGroup, method: str, *args: Any) -> dist.Work:
        work = run(self, method, *args)
        if method in ("_allgather_base", "all_gather_single"):
            work.__class__ = UnawaitedWork
        return work

    return mock.patch.object(SoftwareProcessGroup, "_run", run_unawaited)


EQUIVALENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    # The recording accelerator's classes are patched there.
    "the reduction does not wait for backward": patched(
        SoftwareAccelerator, "Stream", property(lambda _: IndependentStream)
    ),
    "users of gathered parameters do not wait for the all-gather": all_gathers_are_not_awaited,
    # There, the prefetch is issued on the unawaited stream, too. The report would raise an error for its events.
    "the reduction does not wait until the bucket is staged": on_an_unawaited_stream(Gradients, "add_reduced_bucket"),
}
"""The same mistakes, as they are made on this device."""
