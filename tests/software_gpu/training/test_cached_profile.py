"""Check that the quick profile is measured on a device, and that a cached one is used for its machine alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.profiler import cache
from deep_opt_states.profiler.profile import IMPLAUSIBLE, NO_GROUPS, QUICK, measure
from deep_opt_states.profiler.ranks import Ranks
from tests.model.profiles import profile
from tests.ranks import on_ranks, ranks
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.settings import GIB, Settings
from tests.software_gpu.training.test_parity_on_device import MACHINE

EMULATED = {
    "emulated": Settings(rates=MACHINE),
    "emulated, slower link": Settings(rates=replace(MACHINE, h2d=1e10)),
    "emulated, less memory": Settings(rates=MACHINE, memory_bytes=2 * GIB),
}

EFFORT = replace(QUICK, max_samples=3, update_numel=1_000_000, launch_numel=1_000_000, matrix_size=1024)
"""The quick profile is measured with smaller sizes, since this machine executes the work of the GPU."""


def test_no_profile_of_the_software_gpu_is_used_for_the_cpu_or_for_another_emulated_machine(tmp_path: Path) -> None:
    """Request the quick profiles of several machines twice.

    The measurement is replaced by a profile with the machine's name: only the place where it is kept matters here.
    """
    machines = ["CPU", *EMULATED]
    assert on_ranks(1, request_all, group=nullcontext, XDG_CACHE_HOME=str(tmp_path)) == [
        [(machine, machine, measured) for measured in (True, False) for machine in machines]
    ]
    texts = [path.read_text() for path in (tmp_path / "deep_opt_states").iterdir()]
    assert len(texts) == len(machines)


def request_all() -> list[tuple[str, str, bool]]:
    """Return for each request the machine, the machine of the profile that was found, and whether it was measured."""
    device.register()
    found = []
    for _ in range(2):
        found.append(request("CPU", on_device=False))
        for machine, settings in EMULATED.items():
            with plugged(settings):
                found.append(request(machine, on_device=True))
    return found


def request(machine: str, on_device: bool) -> tuple[str, str, bool]:
    with mock.patch.object(cache, "measure", return_value=replace(profile(), name=machine)) as measured:
        found = cache.quick_profile(CudaDevice(0) if on_device else None, Ranks(), print, print, threads=1)
    return machine, found.name, measured.called


@pytest.mark.thorough
@ranks(1, group=nullcontext)
def test_every_probe_of_the_quick_profile_runs_on_the_software_gpu() -> None:
    """Check that only two reasons waive a probe that runs: noise, and copies that ended before any update.

    Both depend on how busy the machine of the test is; a probe that cannot run on a device gives another reason.
    Collectives are not measured at the start of training.
    """
    device.register()
    with plugged(Settings(rates=MACHINE)):
        found = measure(CudaDevice(0), Ranks(), EFFORT, threads=1)
    assert found.gpu_memory_bytes is not None
    assert found.gpu_memory_bytes > 0
    reasons = {name: measurement.waived for name, measurement in found.measurements.items()}
    waived = {name: reason for name, reason in reasons.items() if reason is not None}
    left_out = {name for name, reason in waived.items() if reason == NO_GROUPS.in_node}
    assert left_out == {"all_gather_bytes_per_s", "reduce_scatter_bytes_per_s", "inter_node_bytes_per_s"}
    ran = [reason for name, reason in waived.items() if name not in left_out]
    assert all(reason.startswith(IMPLAUSIBLE) or "nothing overlapped" in reason for reason in ran), waived
    assert not {"h2d_bytes_per_s", "gpu_adam_params_per_s"} - set(reasons)
    assert sum(bool(measurement.samples) for measurement in found.measurements.values()) == len(reasons) - len(waived)
