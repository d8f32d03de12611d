"""Train on the recording accelerator, and print which callers make the host wait for the accelerator or our worker.

The waits are listed per forward, per backward and per ``engine.step()``. Rank 0 prints one answer per dtype and
placement: a pair of results, first with updates that end in the step, then with deferred updates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest import mock

import torch.distributed as dist

from perf_model.schedule.placement import Placement
from tests.launch import answer
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.training import Block, closing_engine, shared_folder, train
from tests.zero.process_group import process_group
from tests.zero.race_detector.instrumentation import recording
from tests.zero.races.engine_race_ranks import NO_THROUGHPUT_TIMER

STEPS, OVERFLOWS_IN = 4, 2


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
        recording(worker_is_done=(False,)) as recorder,
        shared_folder() as folder,
        closing_engine(case, block) as engine,
        ExitStack() as patches,
    ):

        def recorded(phase: str) -> Callable[..., Any]:
            original = getattr(engine, phase)

            def run(*args: Any) -> Any:
                recorder.waits.clear()
                result = original(*args)
                waits[phase].append([" < ".join(re.findall(r":\d+ (\S+)", callers)[:2]) for callers in recorder.waits])
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
    with process_group():
        for dtype, block in product(("bf16", "fp16", "fp32"), (CPU, STRIDE_2, STREAMED)):
            found = [host_waits(dtype, {**block, "overlap_forward": defers}) for defers in (False, True)]
            if dist.get_rank() == 0:
                answer(found)
