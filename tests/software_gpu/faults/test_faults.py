"""Check that every seeded fault is found by the race check and by wrong numbers, and nothing without a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.ranks import on_ranks
from tests.software_gpu import device
from tests.software_gpu.faults.adversaries import ADVERSARIES
from tests.software_gpu.faults.faults import FAULTS, Fault
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.tiers import thorough
from tests.zero.parity.case import NO_THROUGHPUT_TIMER, Case
from tests.zero.parity.training import Block, Record, differences, run_variant

Script = Callable[[], AbstractContextManager[Any]]
Result = dict[str, Any]
RUNS: dict[str, tuple[Case, Script]] = {}
"""The distinct cases with the scripts that they are run in, by a text that is equal for equal ones."""


def on_rank_0(world_size: int, train: Callable[..., list[Result]], *arguments: Any) -> list[Result]:
    """Return what ``train`` returns on the first rank."""
    return list(on_ranks(world_size, train, *arguments, group=software_process_group, timeout_s=600)[0])


def runs() -> Iterator[tuple[str, Fault, str]]:
    """Yield the name of each fault of this number of ranks, the fault, and the key of its run."""
    # DeepSpeed's CPU accelerator returns False on some CPUs, but trains fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    for name, fault in FAULTS[dist.get_world_size()].items():
        yield name, fault, key_of(fault.case(dist.get_world_size()), fault.script)


def key_of(case: Case, script: Script) -> str:
    """Return the key in ``RUNS`` of a case, which is trained without the timer that waits for the device."""
    case = replace(case, extra=NO_THROUGHPUT_TIMER)
    key = f"{case} {id(script)}"
    RUNS[key] = (case, script)
    return key


def error_text(error: BaseException) -> str:
    """Forget the error on the device, and return its text. A failed update has the error of its kernel as its cause."""
    device.call("drain")
    device.take_error()
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


def races_of(key: str, seeded: Script = nullcontext) -> Result:
    """Train on the device, whatever the numbers become, and return the races and the error that was raised."""
    case, script = RUNS[key]
    error = ""
    with plugged(Settings(racecheck=True)), script(), seeded():
        try:
            run_variant(case, case.blocks[0])
        except Exception as raised:  # noqa: BLE001 (reported by the test)
            error = error_text(raised)
        return {"key": key, "races": take_races(), "error": error}


def races_of_faults() -> list[Result]:
    return [{"name": name, **races_of(key, fault.seeded)} for name, fault, key in runs()]


def races_without_faults() -> list[Result]:
    return [races_of(key) for key in dict.fromkeys(key for *_, key in runs())]


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


def numbers_of(key: str, adversary: str, seeded: Script = nullcontext) -> Result:
    """Train on the device, and return a line for each number that is ``wrong``, and the ``error`` that was raised."""
    case, script = RUNS[key]
    # Stock does not depend on the block.
    reference = expected(key if case.uses_of_shared else key_of(replace(case, blocks=()), script))
    result = {"key": key, "adversary": adversary, "wrong": [], "error": ""}
    try:
        with plugged(ADVERSARIES[adversary].settings), ADVERSARIES[adversary].host(), seeded():
            return {**result, "wrong": differences(reference, trained(case, case.blocks[0], script))}
    except Exception as error:  # noqa: BLE001 (reported by the test)
        return {**result, "error": error_text(error)}


def numbers_of_faults() -> list[Result]:
    return [
        {"name": name, **numbers_of(key, fault.adversary, fault.seeded)}
        for name, fault, key in runs()
        if fault.adversary is not None
    ]


def numbers_without_faults(every_case: bool) -> list[Result]:
    """Train a case without its fault in each adversary that shows one; or every case, and also in another adversary."""
    shown = [(key, fault.adversary) for _, fault, key in runs() if fault.adversary]
    if every_case:
        chosen = {*shown, *zip((key for key, _ in shown), cycle(ADVERSARIES), strict=False)}
    else:
        chosen = set({adversary: (key, adversary) for key, adversary in shown}.values())
    return [numbers_of(key, adversary) for key, adversary in sorted(chosen)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_race_check_reports_every_seeded_fault(world_size: int) -> None:
    found = {result["name"]: result for result in on_rank_0(world_size, races_of_faults)}
    assert found.keys() == FAULTS[world_size].keys()
    for name, fault in FAULTS[world_size].items():
        races, error = found[name]["races"], found[name]["error"]
        if fault.refused:
            assert error.startswith(fault.refused), name
        else:
            assert any(map(fault.is_shown_by, races)), f"{name}: {races} {error}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_race_check_reports_nothing_without_a_fault(world_size: int) -> None:
    found = on_rank_0(world_size, races_without_faults)
    assert found
    assert [result for result in found if result["races"] or result["error"]] == []


@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_every_seeded_fault_gives_wrong_numbers(world_size: int) -> None:
    found = {result["name"]: result for result in on_rank_0(world_size, numbers_of_faults)}
    assert found.keys() == {name for name, fault in FAULTS[world_size].items() if fault.adversary is not None}
    assert [result for result in found.values() if result["error"] or not result["wrong"]] == []


@pytest.mark.parametrize("every_case", [False, thorough(True)])
@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_the_adversaries_give_the_bits_of_stock_without_a_fault(world_size: int, every_case: bool) -> None:
    results = on_rank_0(world_size, numbers_without_faults, every_case)
    showing = {fault.adversary for fault in FAULTS[world_size].values()} - {None}
    assert {result["adversary"] for result in results} == (ADVERSARIES.keys() if every_case else showing)
    assert [result for result in results if result["wrong"] or result["error"]] == []
