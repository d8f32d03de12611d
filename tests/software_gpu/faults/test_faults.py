"""Check that every seeded fault is found by the race check and by wrong numbers, and nothing without a fault."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import ranks
from tests.software_gpu import device
from tests.software_gpu.faults.adversaries import ADVERSARIES
from tests.software_gpu.faults.faults import FAULTS, Fault
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.tiers import thorough
from tests.zero.parity.case import Case
from tests.zero.parity.training import Block, Record, differences, run_variant

Seeded = Callable[[], AbstractContextManager[object]]


def error_text(error: BaseException) -> str:
    """Forget the error on the device, and return its text. A failed update has the error of its kernel as its cause."""
    device.call("drain")
    device.take_error()
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


def races_of(fault: Fault, seeded: Seeded = nullcontext) -> tuple[list[str], str]:
    """Train on the device, whatever the numbers become, and return the races and the error that was raised."""
    error = ""
    with plugged(Settings(racecheck=True)), fault.script(), seeded():
        try:
            run_variant(fault.case(), fault.block)
        except Exception as raised:  # noqa: BLE001 (the caller judges it)
            error = error_text(raised)
        return take_races(), error


def trained(case: Case, block: Block, script: Callable[[], AbstractContextManager[Any]]) -> Record:
    """Train the case, and record the values that the script reads as well."""
    with script() as results:
        record = run_variant(case, block)
    record.numbers["read"] = [value.item() for values in results or () for value in values or ()]
    return record


_REFERENCES: dict[Any, Record] = {}


def numbers_of(fault: Fault, adversary: str, seeded: Seeded = nullcontext) -> tuple[list[str], str]:
    """Train on the device, and return a line for each wrong number, and the error that was raised.

    The reference is stock on the CPU accelerator, or the plugin there where stock departs from us.
    """
    case = fault.case()
    block = fault.block if case.uses_of_shared else None
    key = repr((replace(case, blocks=()), block)), fault.script
    if key not in _REFERENCES:
        _REFERENCES[key] = trained(case, block, fault.script)
    settings, host = ADVERSARIES[adversary]
    try:
        with plugged(settings), host(), seeded():
            return differences(_REFERENCES[key], trained(case, fault.block, fault.script)), ""
    except Exception as error:  # noqa: BLE001 (the caller judges it)
        return [], error_text(error)


# A fault shows on rank 0. Other ranks stop when rank 0 fails.


@ranks(1, 2, group=software_process_group, timeout_s=600)
def test_the_race_check_reports_every_seeded_fault_and_nothing_without_it() -> None:
    clean = set()
    for name, fault in FAULTS[dist.get_world_size()].items():
        races, error = races_of(fault, fault.seeded)
        if fault.refused:
            assert error.startswith(fault.refused), name
        elif dist.get_rank() == 0:
            assert any(map(fault.is_shown_by, races)), f"{name}: {races} {error}"
        key = repr(fault.case()), fault.script
        if key not in clean:
            clean.add(key)
            assert races_of(fault) == ([], ""), f"without the fault: {name}"


@ranks(1, thorough(2), group=software_process_group, timeout_s=600)
def test_every_seeded_fault_gives_wrong_numbers_and_its_adversary_the_bits_of_stock() -> None:
    shown = {}
    for name, fault in FAULTS[dist.get_world_size()].items():
        if fault.adversary is not None:
            wrong, error = numbers_of(fault, fault.adversary, fault.seeded)
            assert dist.get_rank() > 0 or (wrong and not error), f"{name}: {error}"
            shown[fault.adversary] = fault
    for adversary, fault in shown.items():
        assert numbers_of(fault, adversary) == ([], ""), adversary


@pytest.mark.thorough
@ranks(1, 2, group=software_process_group, timeout_s=600)
def test_all_adversaries_give_the_bits_of_stock_without_a_fault() -> None:
    for fault, other in zip(FAULTS[dist.get_world_size()].values(), cycle(ADVERSARIES), strict=False):
        for adversary in {fault.adversary, other} - {None}:
            assert numbers_of(fault, adversary) == ([], ""), adversary
