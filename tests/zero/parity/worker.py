"""One rank: trains every case of its world size and writes what differs. Started by ``test_parity.py``.

Several cases a process, since importing DeepSpeed is the slow part.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.zero.parity.arm import Record, differences, run_arm, run_resumed
from tests.zero.parity.case import Case
from tests.zero.parity.cases import CASES, DEPARTURES
from tests.zero.parity.naive import NAIVE, applied
from tests.zero.process_group import process_group

Result = dict[str, Any]


def same_as_stock(case: Case) -> Result:
    if case.resume:
        stock = run_resumed(case, None, None)
        arms = {f"stock to {block}": run_resumed(case, None, block) for block in case.blocks}
        arms |= {f"{block} to stock": run_resumed(case, block, None) for block in case.blocks}
    else:
        stock = run_arm(case, None)
        arms = {str(block): run_arm(case, block) for block in case.blocks}
    return result(stock, arms)


def same_as_zero_gradients(case: Case) -> Result:
    """Ours on the case against stock on zero gradients; ``stock differs`` shows why that is a departure."""
    zeroed = run_arm(replace(case, zero_instead_of_skip=True), None)
    found = result(zeroed, {str(block): run_arm(case, block) for block in case.blocks})
    return {**found, "stock differs": differences(zeroed, run_arm(case, None))}


def naive(name: str) -> Result:
    case = next(case for case in (*CASES, *DEPARTURES) if case.name == NAIVE[name][0])
    stock = run_arm(replace(case, zero_instead_of_skip=True), None)
    with applied(name):
        return result(stock, {"naive": run_arm(case, case.blocks[0])})


def result(stock: Record, arms: dict[str, Record]) -> Result:
    return {
        "numbers": stock.numbers,
        "stock class": stock.optimizer_class,
        "classes": {name: arm.optimizer_class for name, arm in arms.items()},
        "deferred": {name: [arm.deferred, len(arm.published)] for name, arm in arms.items()},
        "differences": {name: differences(stock, arm) for name, arm in arms.items()},
    }


def main(path: str) -> None:
    # The CPU accelerator trains fp16, but says that it does not.
    get_accelerator().is_fp16_supported = lambda: True
    world_size = dist.get_world_size()
    work: dict[str, Callable[[], Result]] = {}
    for case in (case for case in CASES if case.world_size == world_size):
        work[case.name] = lambda case=case: same_as_stock(case)
    for case in (case for case in DEPARTURES if case.world_size == world_size):
        work[case.name] = lambda case=case: same_as_zero_gradients(case)
    world_sizes = {case.name: case.world_size for case in (*CASES, *DEPARTURES)}
    for name in (name for name in NAIVE if world_sizes[NAIVE[name][0]] == world_size):
        work[name] = lambda name=name: naive(name)
    results = {}
    for name, train in work.items():
        try:
            results[name] = train()
        except Exception:  # noqa: BLE001 (reported by the test)
            # The ranks' collectives no longer match: what follows could only wait.
            results[name] = {"error": traceback.format_exc()}
            break
    Path(f"{path}.{dist.get_rank()}").write_text(json.dumps(results))


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
