"""Says what gradients moved between host memory and the accelerator; started as a program, on the recording one.

Argument: the cases as JSON, each a block and a number of micro-batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from perf_model.schedule.placement import Placement
from tests.launch import answer
from tests.zero.parity.arm import closing_engine, shared_folder, train
from tests.zero.parity.case import Case
from tests.zero.process_group import process_group
from tests.zero.recording.memory import Memory, Place
from tests.zero.recording.recorder import Recorder
from tests.zero.recording.recording import recording

OURS = ("gradients.py", "staging.py")
"""The files in which gradients are moved."""


def noted(allocated: Callable[..., Memory], by: list[str]) -> Callable[..., Memory]:
    """Return ``allocated``, which notes in ``by`` who allocates memory on the accelerator in backward."""

    def allocated_by(tensor: torch.Tensor, place: Place) -> Memory:
        memory = allocated(tensor, place)
        # The nearest caller is this function.
        _, *callers = memory.name.split(" < ")
        if place is Place.ACCELERATOR and any("gradients.py" in caller and "reduced" in caller for caller in callers):
            by.append(callers[0])
        return memory

    return allocated_by


def traffic(recorder: Recorder | None, block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Train and return what moved; without a ``recorder``, on a real accelerator, not who allocated memory."""
    case = Case(
        name="traffic",
        blocks=(block,),
        accumulation=accumulation,
        sub_group_size=4000,
        zero={"reduce_bucket_size": 100_000},
    )
    with shared_folder() as folder, closing_engine(case, block) as engine:
        optimizer = engine.optimizer
        reserved = [(its.where.value, its.each_bytes) for its in optimizer.ledger.reserved]
        allocated: list[str] = []
        if recorder is None:
            train(engine, case, folder)
        else:
            with mock.patch.object(recorder, "allocated", noted(recorder.allocated, allocated)):
                train(engine, case, folder)
            assert len(allocated) > 0, "the norms that DeepSpeed takes, at least"
        return {
            "reserved": reserved,
            "reserved while training": len(optimizer.ledger.reserved) - len(reserved),
            "allocated": [who for who in allocated if who.startswith(OURS)],
            "longest": max(param.partition_numel() for group in optimizer.fp16_groups for param in group),
            **asdict(optimizer._gradients.traffic),
            "steps": case.steps,
            "numels": [its.numel for its in optimizer.plan.workload.sub_groups],
            "numel": {its.value: optimizer.plan.numel(its) for its in Placement},
            "parameters": sum(len(group) for group in optimizer.fp16_groups),
            "element_bytes": optimizer.gradient_accumulation_dtype.itemsize,
        }


if __name__ == "__main__":
    with process_group():
        for block, accumulation in json.loads(sys.argv[1]):
            with recording() as recorder:
                answer(traffic(recorder, block, accumulation))
