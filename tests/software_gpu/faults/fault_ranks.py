"""Train with each seeded fault on the device, and print the differences from a run on the CPU accelerator.

Arguments: ``races``, for the races of each fault; ``no races``, for those of the same cases without faults; ``faults``,
for each fault in its adversary; ``controls``, for one run without a fault in each of these adversaries; or ``all
controls``, for the cases of all faults without them, each in its adversary and in another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.faults.adversaries import ADVERSARIES
from tests.software_gpu.faults.faults import FAULTS
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.zero.parity.case import NO_THROUGHPUT_TIMER, Case
from tests.zero.parity.training import Block, Record, differences, run_variant

Script = Callable[[], AbstractContextManager[Any]]

RUNS: dict[str, tuple[Case, Script]] = {}
"""The distinct cases with the scripts that they are run in, by a text that is equal for equal ones."""


def key_of(case: Case, script: Script) -> str:
    """Return the key in ``RUNS`` of a case, whose name does not matter."""
    case = replace(case, name="", extra=NO_THROUGHPUT_TIMER)
    key = f"{case} {id(script)}"
    RUNS[key] = (case, script)
    return key


def trained(case: Case, block: Block, script: Script) -> Record:
    """Train the case, and record the values that the script reads as well."""
    with script() as results:
        record = run_variant(case, block)
    record.numbers["read"] = [value.item() for values in results or () for value in values or ()]
    return record


@cache
def expected(key: str) -> Record:
    """Return the record of stock on the CPU accelerator, or of the plugin there where stock departs from us."""
    case, script = RUNS[key]
    return trained(case, case.blocks[0] if case.uses_of_shared else None, script)


def trained_on_device(key: str, adversary: str, seeded: Callable[[], AbstractContextManager[object]]) -> dict[str, Any]:
    """Train on the device, and return a line for each number that is ``wrong``, and the ``error`` that was raised."""
    case, script = RUNS[key]
    # Stock does not depend on the block.
    reference = expected(key if case.uses_of_shared else key_of(replace(case, blocks=()), script))
    try:
        with plugged(ADVERSARIES[adversary].settings), ADVERSARIES[adversary].host(), seeded():
            return {"wrong": differences(reference, trained(case, case.blocks[0], script)), "error": ""}
    except Exception as error:  # noqa: BLE001 (reported by the test)
        device.call("drain")
        device.take_error()
        # A failed update has the error of its kernel as its cause.
        cause = error.__cause__ or error
        return {"wrong": [], "error": f"{type(cause).__name__}: {cause}"}


def races_of(case: Case, script: Script, seeded: Callable[[], AbstractContextManager[object]]) -> dict[str, Any]:
    """Train on the device, whatever the numbers become, and return the races and the error that was raised."""
    error: BaseException | None = None
    with plugged(Settings(racecheck=True)), script(), seeded():
        try:
            run_variant(replace(case, extra=NO_THROUGHPUT_TIMER), case.blocks[0])
        except Exception as raised:  # noqa: BLE001 (reported by the test)
            error = raised.__cause__ or raised
            device.call("drain")
            device.take_error()
        return {"races": take_races(), "error": "" if error is None else f"{type(error).__name__}: {error}"}


def main(selected: str) -> None:
    get_accelerator().is_fp16_supported = lambda: True
    faults = [fault for fault in FAULTS if fault.world_size == dist.get_world_size()]
    if selected in ("races", "no races"):
        for fault in faults:
            found = races_of(fault.case, fault.script, fault.seeded if selected == "races" else nullcontext)
            answer_on_rank_0({"fault": fault.name, **found})
        return
    keys = {fault.name: key_of(fault.case, fault.script) for fault in faults}
    shown = {fault.name: fault.adversary for fault in faults if fault.adversary is not None}
    if selected == "faults":
        for fault in faults:
            if fault.adversary is not None:
                found = trained_on_device(keys[fault.name], fault.adversary, fault.seeded)
                answer_on_rank_0({"fault": fault.name, "adversary": fault.adversary, **found})
        return
    if selected == "controls":
        chosen = set({adversary: (keys[name], adversary) for name, adversary in shown.items()}.values())
    else:
        chosen = {(keys[name], adversary) for name, adversary in shown.items()}
        chosen |= set(zip(keys.values(), cycle(ADVERSARIES), strict=False))
    for key, adversary in sorted(chosen):
        answer_on_rank_0({"case": key, "adversary": adversary, **trained_on_device(key, adversary, nullcontext)})


def answer_on_rank_0(result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        answer(result)


if __name__ == "__main__":
    with software_process_group():
        main(" ".join(sys.argv[1:]))
