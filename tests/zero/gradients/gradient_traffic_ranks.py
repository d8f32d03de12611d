"""Print the traffic of gradients between host memory and the accelerator, on the GPU in software.

The argument is a JSON list of cases: a block, a number of micro-batches per step, and whether sums stay on the device.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, astuple
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf_model.schedule.placement import Placement
from tests.launch import answer
from tests.software_gpu.faults.faults import sums_on_the_host
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.case import Case
from tests.zero.parity.training import closing_engine, shared_folder, train

GRADIENT_FILES = ("gradients.py", "staging.py")
"""The plugin's files that move gradients."""


class AllocationLog(TorchDispatchMode):
    """A log of the callers that allocate memory of the device where the plugin takes gradients in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE_TYPE and _storage(tensor) not in known:
                callers = _callers()
                if any("gradients.py" in caller and "add_reduced_bucket" in caller for caller in callers):
                    self.callers.append(callers[0])
        return result


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _callers() -> list[str]:
    """Return the callers outside of PyTorch and of this file, nearest first."""
    names = []
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and "/torch/" not in path:
            names.append(f"{path.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return names


def traffic(allocations: AllocationLog | None, block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Train and return the traffic. Without ``allocations``, as on a real GPU, they are not logged."""
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
        with allocations or nullcontext():
            train(engine, case, folder)
        allocated = [] if allocations is None else allocations.callers
        assert allocated or allocations is None, "DeepSpeed allocates memory for the norms, at least"
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
    with software_process_group():
        for block, accumulation, sums_stay in json.loads(sys.argv[1]):
            with plugged(), nullcontext() if sums_stay else sums_on_the_host():
                answer(traffic(AllocationLog(), block, accumulation))
