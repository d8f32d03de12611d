"""Check that a cached profile of an emulated machine is used for that machine alone."""

from __future__ import annotations

from pathlib import Path

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
