"""Train on the lazy device, and print which waits the host makes in each step, and how many copies of each kind run.

Argument: ``few`` or ``all``. Rank 0 prints one answer per dtype, placement of parameters, and config block.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch.distributed as dist

from deep_opt_states.device.cuda import CudaEvent
from deep_opt_states.runtime.action_events import ActionEvents
from deep_opt_states.zero.step.exposure import UpdateWaits
from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.zero.parity.case import CPU, NO_THROUGHPUT_TIMER, RESIDENT, STREAMED, STRIDE_2, Case, not_deferred
from tests.zero.parity.training import Block, closing_engine, shared_folder, train

STEPS, STEADY_FROM = 5, 2
"""In the first step no update is in flight, and after the second DeepSpeed has a trace of the modules."""

LAZY = Settings(lazy=True, lazy_s=20.0, trace=True)

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": CPU,
    "stride": {**STRIDE_2, "num_slots": 2},
    "streamed": {**STREAMED, "num_slots": 2},
    "resident": RESIDENT,
}
"""The number of slots is given: otherwise the host waits once, in the step in which slots are added."""

UPDATES: dict[str, Callable[[dict[str, Any]], Block]] = {"ends in step": not_deferred, "deferred": dict}

HELPERS = ("library.py", "device.py", "cuda.py", "accelerator.py", "compat.py", "nvtx.py", "__init__.py")
"""Files whose functions wait on behalf of their callers. ``__init__.py`` is that of ``torch.accelerator``."""


@dataclass(frozen=True, kw_only=True)
class BlockingVariant:
    """A training with stock, or with a config block: its placement, and how the update ends."""

    dtype: str
    offloads: bool
    placement: str = ""
    update: str = "stock"

    @property
    def block(self) -> Block:
        """Return the config block; None for stock."""
        if self.update == "stock":
            return None
        return UPDATES[self.update](PLACEMENTS[self.placement])


def variants(which: str) -> Iterator[BlockingVariant]:
    """Yield all variants, or those of ``make test``."""
    for dtype, offloads in product(("bf16", "fp16", "fp32"), (False, True)):
        yield BlockingVariant(dtype=dtype, offloads=offloads)
        usual = (dtype, offloads) == ("bf16", False)
        for placement, update in product(PLACEMENTS, UPDATES):
            if (
                which == "all"
                or (usual and dist.get_world_size() == 1)
                or (placement, update) == ("stride", "deferred")
            ):
                yield BlockingVariant(dtype=dtype, offloads=offloads, placement=placement, update=update)


@contextmanager
def unreached_events_of_reports() -> Iterator[list[bool]]:
    """Record whether the device had not reached an event yet when the report of an update waits for that event.

    The lazy device has not reached the end of the flushes unless something else has waited for it. A real one has had a
    forward and a backward for them. So waits for flushes are left out.
    """
    unreached: list[bool] = []
    phases, timeline, synchronize = UpdateWaits.phases, ActionEvents.timeline, CudaEvent.synchronize

    def recorded(*left_out: object) -> AbstractContextManager[Any]:
        def recorded_synchronize(self: CudaEvent) -> None:
            if self not in left_out:
                unreached.append(not self.finished())
            synchronize(self)

        return mock.patch.object(CudaEvent, "synchronize", recorded_synchronize)

    def recorded_phases(self: UpdateWaits) -> Any:
        with recorded():
            return phases(self)

    def recorded_timeline(self: ActionEvents, actions: Any) -> Any:
        with recorded(self.flushed):
            return timeline(self, actions)

    with (
        mock.patch.object(UpdateWaits, "phases", recorded_phases),
        mock.patch.object(ActionEvents, "timeline", recorded_timeline),
    ):
        yield unreached


def name_of(wait: device.Wait) -> list[str]:
    """Return the reason of the wait, the thread, and the nearest caller that waits for a purpose of its own."""
    caller = next(caller for caller in wait.callers if caller.partition(":")[0] not in HELPERS)
    thread = "worker" if wait.thread == "deep_opt_states-cpu-lane" else "script"
    return [wait.reason, thread, caller]


def trained(case: Case, block: Block) -> dict[str, Any]:
    """Train the case, and return the waits of each steady forward, backward and step, and the copies of all."""
    steady: dict[str, list[list[list[str]]]] = {"forward": [], "backward": [], "step": []}
    with (
        plugged(LAZY),
        shared_folder() as folder,
        closing_engine(case, block) as engine,
        device.recorded_host_waits() as waits,
        unreached_events_of_reports() as unreached,
        ExitStack() as patches,
    ):

        def recorded(phase: str) -> Callable[..., Any]:
            original = getattr(engine, phase)

            def run(*args: Any) -> Any:
                waits.clear()
                result = original(*args)
                if engine.global_steps - (phase == "step") >= STEADY_FROM:
                    steady[phase].append([name_of(wait) for wait in waits])
                if phase == "step" and engine.global_steps == STEADY_FROM:
                    device.call("drain")
                    device.take_spans()
                return result

            return run

        for phase in steady:
            patches.enter_context(mock.patch.object(engine, phase, recorded(phase)))
        # The record would read the optimizer's states, with copies of its own.
        with mock.patch("tests.zero.parity.training.collect"):
            train(engine, case, folder)
        if block is not None:
            engine.optimizer._update.wait()
        device.call("drain")
        copies = Counter(span.name for span in device.take_spans() if span.name.startswith("copy "))
        sub_groups = len(engine.optimizer.fp16_groups)
    return {
        "waits": steady,
        "unreached": sum(unreached),
        "copies": copies,
        "sub-groups": sub_groups,
    }


def main(which: str) -> None:
    for variant in variants(which):
        case = Case(
            name="blocking",
            blocks=(variant.block or {},),
            world_size=dist.get_world_size(),
            dtype=variant.dtype,
            steps=STEPS,
            clip=0.3,
            offload_param=variant.offloads,
            extra={**NO_THROUGHPUT_TIMER, "steps_per_print": 1},
        )
        found = trained(case, variant.block)
        if dist.get_rank() == 0:
            answer({**vars(variant), **found})


if __name__ == "__main__":
    with software_process_group():
        main(*sys.argv[1:])
