"""Train on the device, and print which callers make the host wait for the device or our worker.

The waits are listed per forward, per backward and per ``engine.step()``. Rank 0 prints one answer per dtype and
placement: a pair of results, first with updates that end in the step, then with deferred updates.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_opt_states.runtime.uninterrupted import THREAD_NAME
from deep_opt_states.runtime.worker import Worker
from perf_model.schedule.placement import Placement
from tests.launch import answer
from tests.software_gpu.library import HostWait, call
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.case import CPU, NO_THROUGHPUT_TIMER, STREAMED, STRIDE_2, Case
from tests.zero.parity.training import Block, closing_engine, shared_folder, train

STEPS, OVERFLOWS_IN = 4, 2

HIDDEN = (
    str(Path(torch.__file__).parent),
    *(str(Path(__file__).parents[1] / name) for name in ("accelerator.py", "device.py", "library.py", "racecheck.py")),
    __file__,
    "<",
)
"""The beginnings of paths whose functions wait on behalf of their callers."""


def callers() -> str:
    """Return the names of the two nearest callers."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(names) < 2:
        path = frame.f_code.co_filename
        if not path.startswith(HIDDEN) and "contextlib" not in path:
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Record the callers of each wait of the main thread, and of sections, for which the main thread waits."""
    waits: list[str] = []
    submit = Worker.submit

    def record() -> None:
        if threading.current_thread().name in (threading.main_thread().name, THREAD_NAME):
            waits.append(callers())

    @HostWait
    def record_wait_for_device(_: bytes) -> None:
        record()

    def recorded(wait: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_wait(timeout: float | None = None) -> Any:
            record()
            return wait(timeout)

        return recorded_wait

    def submit_recorded(self: Worker, task: Callable[[], None]) -> Future[None]:
        future = submit(self, task)
        for name in ("result", "exception"):
            setattr(future, name, recorded(getattr(future, name)))
        return future

    call("on_host_wait", record_wait_for_device)
    try:
        with mock.patch.object(Worker, "submit", submit_recorded):
            yield waits
    finally:
        call("on_host_wait", HostWait())


def host_waits(dtype: str, block: Block) -> dict[str, Any]:
    """Train for ``STEPS`` steps, and return the two nearest callers of each wait. Gradients overflow in one step."""
    # Each update is reported, with the time of each of its actions.
    block = {**(block or {}), "log_every": 1}
    case = Case(
        name="host waits",
        blocks=(block,),
        world_size=dist.get_world_size(),
        dtype=dtype,
        steps=STEPS,
        clip=0.3,
        poisoned={OVERFLOWS_IN: math.inf},
        extra=NO_THROUGHPUT_TIMER,
    )
    waits: dict[str, list[list[str]]] = {"forward": [], "backward": [], "step": []}
    left_to_issue: list[int] = []
    with (
        plugged(),
        recorded_waits() as host_waits_so_far,
        shared_folder() as folder,
        closing_engine(case, block) as engine,
        ExitStack() as patches,
    ):

        def recorded(phase: str) -> Callable[..., Any]:
            original = getattr(engine, phase)

            def run(*args: Any) -> Any:
                host_waits_so_far.clear()
                result = original(*args)
                waits[phase].append(list(host_waits_so_far))
                return result

            return run

        for phase in waits:
            patches.enter_context(mock.patch.object(engine, phase, recorded(phase)))
        executor, report = engine.optimizer._running.executor, engine.optimizer.report

        def updated(*args: Any, reported: Callable[..., Any] = report.updated) -> None:
            if executor.pending:
                left_to_issue.append(len(executor._issuer.schedule.actions) - executor._issuer.issued)
            reported(*args)

        patches.enter_context(mock.patch.object(report, "updated", updated))
        train(engine, case, folder)
        placements = engine.optimizer.plan.placements
        on_cpu = placements.count(Placement.CPU)
        return {
            "dtype": dtype,
            "block": block,
            "units": len(placements),
            "on the CPU": on_cpu,
            "left to issue when the last update is reported": left_to_issue,
            **waits,
        }


if __name__ == "__main__":
    with software_process_group():
        for dtype, block in product(("bf16", "fp16", "fp32"), (CPU, STRIDE_2, STREAMED)):
            found = [host_waits(dtype, {**block, "overlap_forward": defers}) for defers in (False, True)]
            if dist.get_rank() == 0:
                answer(found)
