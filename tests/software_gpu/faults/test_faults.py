"""Check that the race check finds every seeded fault and nothing without one, and that some give wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from tests.ranks import ranks
from tests.software_gpu import device
from tests.software_gpu.faults.faults import FAULTS, Fault
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.zero.parity.training import differences, run_variant

Seeded = Callable[[], AbstractContextManager[object]]
LAZY = Settings(lazy=True, lazy_s=20.0)
"""A task for which nothing waits is later than the end of any of these runs, also on a busy machine."""


def error_text(error: BaseException) -> str:
    """Clear the error on the device, and return its text. A failed update has the error of its kernel as its cause."""
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


@ranks(1, group=software_process_group, timeout_s=600)
def test_a_lazy_device_turns_seeded_faults_into_wrong_numbers() -> None:
    """Check a few faults, since the order of events in a lazy device does not depend on the speed of this machine."""
    for name in (
        "update ends without waiting for its streams: forward reads parameters while PUBLISH writes them",
        "staging does not wait until its buffer is copied to the host",
        "GPU_STEP does not wait for PREFETCH",
        "GPU_STEP does not wait until resident states are loaded",
    ):
        fault = FAULTS[1][name]
        case = fault.case()
        stock = run_variant(case, None)
        for seeded in (nullcontext, fault.seeded):
            with plugged(LAZY), seeded():
                assert bool(differences(stock, run_variant(case, fault.block))) == (seeded is fault.seeded), name
