"""Trains on the recording accelerator, and says by whom the host is made to wait for it in each ``engine.step()``.

Rank 0 prints an answer for each dtype and placement.
"""

from __future__ import annotations

import math
import re
from itertools import product
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.launch import answer
from tests.zero.parity.arm import Block, closing_engine, shared_folder, train
from tests.zero.parity.case import CPU, STRIDE_2, Case
from tests.zero.process_group import process_group
from tests.zero.recording.recording import recording
from tests.zero.scripts.recorded import NO_THROUGHPUT_TIMER

OVERFLOWS_IN = 2


def host_waits(dtype: str, block: Block) -> dict[str, Any]:
    """The callers' names, the nearest first; gradients overflow in one of the steps."""
    case = Case(
        name="host waits",
        blocks=(block,),
        world_size=dist.get_world_size(),
        dtype=dtype,
        steps=4,
        clip=0.3,
        poisoned={OVERFLOWS_IN: math.inf},
        extra=NO_THROUGHPUT_TIMER,
    )
    steps: list[list[str]] = []
    with recording() as recorder, shared_folder() as folder, closing_engine(case, block) as engine:
        step = engine.step

        def noted_step() -> None:
            recorder.waits.clear()
            step()
            steps.append([re.sub(r"\S+:\d+ ", "", by) for by in recorder.waits])

        with mock.patch.object(engine, "step", noted_step):
            train(engine, case, folder)
        return {"dtype": dtype, "block": block, "sub-groups": len(engine.optimizer.fp16_groups), "steps": steps}


if __name__ == "__main__":
    with process_group():
        for dtype, block in product(("bf16", "fp16", "fp32"), (CPU, STRIDE_2)):
            found = host_waits(dtype, block)
            if dist.get_rank() == 0:
                answer(found)
