"""Check that the quick profile is measured on a device, and that a cached one is used for its machine alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_opt_states.profiler.profile import IMPLAUSIBLE, NO_GROUPS
from tests.launch import run_ranks
from tests.software_gpu.training.cached_profile_ranks import EMULATED


def test_no_profile_of_the_software_gpu_is_used_for_the_cpu_or_for_another_emulated_machine(tmp_path: Path) -> None:
    program = "tests.software_gpu.training.cached_profile_ranks"
    (finished,) = run_ranks(1, ["-m", program, str(tmp_path)], timeout_s=100)
    assert finished.returncode == 0, finished.output[-5000:]
    machines = ["CPU", *EMULATED]
    assert finished.answers() == [
        {"machine": machine, "profile of": machine, "measured": measured}
        for measured in (True, False)
        for machine in machines
    ]
    texts = [path.read_text() for path in (tmp_path / "deep_opt_states").iterdir()]
    assert len(texts) == len(machines)


@pytest.mark.thorough
def test_every_probe_of_the_quick_profile_runs_on_the_software_gpu() -> None:
    """Check that only two reasons waive a probe that runs: noise, and copies that ended before any update.

    Both depend on how busy the machine of the test is; a probe that cannot run on a device gives another reason.
    Collectives are not measured at the start of training.
    """
    (finished,) = run_ranks(1, ["-m", "tests.software_gpu.training.measured_profile_ranks"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-5000:]
    (found,) = finished.answers()
    assert found["gpu_memory_bytes"] > 0
    waived = {name: reason for name, reason in found["waived"].items() if reason is not None}
    left_out = {name for name, reason in waived.items() if reason == NO_GROUPS.in_node}
    assert left_out == {"all_gather_bytes_per_s", "reduce_scatter_bytes_per_s", "inter_node_bytes_per_s"}
    ran = [reason for name, reason in waived.items() if name not in left_out]
    assert all(reason.startswith(IMPLAUSIBLE) or "nothing overlapped" in reason for reason in ran), waived
    assert not {"h2d_bytes_per_s", "gpu_adam_params_per_s"} - set(found["waived"])
    assert sum(map(bool, found["numbers of samples"])) == len(found["waived"]) - len(waived)
