"""Print the traffic of gradients between host memory and the accelerator, on the recording accelerator.

The argument is a JSON list of cases: a block and a number of micro-batches per step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import Any
from unittest import mock

import torch

from perf_model.schedule.placement import Placement
from tests.launch import answer
from tests.zero.parity.case import Case
from tests.zero.parity.training import closing_engine, shared_folder, train
from tests.zero.process_group import process_group
from tests.zero.race_detector.detector import Recorder
from tests.zero.race_detector.instrumentation import recording
from tests.zero.race_detector.storages import Memory, Place

GRADIENT_FILES = ("gradients.py", "staging.py")
"""The plugin's files that move gradients."""


def with_log(allocated: Callable[..., Memory], log: list[str]) -> Callable[..., Memory]:
    """Return ``allocated`` wrapped: it appends to ``log`` each caller that allocates accelerator memory in backward."""

    def logged(tensor: torch.Tensor, place: Place) -> Memory:
        memory = allocated(tensor, place)
        # The first name is that of ``logged``.
        _, *callers = memory.name.split(" < ")
        if place is Place.ACCELERATOR and any(
            "gradients.py" in caller and "add_reduced_bucket" in caller for caller in callers
        ):
            log.append(callers[0])
        return memory

    return logged


def traffic(recorder: Recorder | None, block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Train and return the traffic. Without a ``recorder``, as on a real accelerator, allocations are not logged."""
    case = Case(
        name="traffic",
        blocks=(block,),
        accumulation=accumulation,
        sub_group_size=4000,
        zero={"reduce_bucket_size": 100_000},
    )
    with shared_folder() as folder, closing_engine(case, block) as engine:
        optimizer = engine.optimizer
        reserved = [
            (reservation.kind.value, reservation.each_bytes) for reservation in optimizer.accounting_device.reserved
        ]
        allocated: list[str] = []
        if recorder is None:
            train(engine, case, folder)
        else:
            with mock.patch.object(recorder, "allocated", with_log(recorder.allocated, allocated)):
                train(engine, case, folder)
            assert len(allocated) > 0, "DeepSpeed allocates memory for the norms, at least"
        return {
            "reserved": reserved,
            "reserved while training": len(optimizer.accounting_device.reserved) - len(reserved),
            "allocated": [caller for caller in allocated if caller.startswith(GRADIENT_FILES)],
            "longest": max(param.partition_numel() for group in optimizer.fp16_groups for param in group),
            **asdict(optimizer._gradients.traffic),
            "steps": case.steps,
            "ranges": [[astuple(run) for run in unit.ranges] for unit in optimizer.plan.workload.units],
            "numel": {placement.value: optimizer.plan.numel(placement) for placement in Placement},
            "parameters": sum(len(group) for group in optimizer.fp16_groups),
            "element_bytes": optimizer.gradient_accumulation_dtype.itemsize,
        }


if __name__ == "__main__":
    with process_group():
        for block, accumulation in json.loads(sys.argv[1]):
            with recording() as recorder:
                answer(traffic(recorder, block, accumulation))
