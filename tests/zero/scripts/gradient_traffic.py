"""Says what gradients moved between host memory and the accelerator; started as a program, on the recording one.

Argument: the cases as JSON, each a block and a number of micro-batches.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from perf_model.placement import Placement
from tests.launch import answer
from tests.zero.parity.arm import closing_engine, shared_folder, train
from tests.zero.parity.case import Case
from tests.zero.process_group import process_group
from tests.zero.recording.recording import recording


def traffic(block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    case = Case(
        name="traffic",
        blocks=(block,),
        accumulation=accumulation,
        sub_group_size=4000,
        zero={"reduce_bucket_size": 100_000},
    )
    with shared_folder() as folder, closing_engine(case, block) as engine:
        train(engine, case, folder)
        optimizer = engine.optimizer
        return {
            **asdict(optimizer._gradients.traffic),
            "steps": case.steps,
            "numel": {its.value: optimizer.plan.numel(its) for its in Placement},
            "parameters": sum(len(group) for group in optimizer.fp16_groups),
            "element_bytes": optimizer.gradient_accumulation_dtype.itemsize,
        }


if __name__ == "__main__":
    with process_group():
        for block, accumulation in json.loads(sys.argv[1]):
            with recording():
                answer(traffic(block, accumulation))
