"""Test ``quick_profile`` with real ranks, as training calls it."""

from __future__ import annotations

from pathlib import Path

from perf_model.prediction.hardware import HardwareProfile
from tests.launch import run_ranks


def test_two_ranks_measure_together_once_and_fail_together(tmp_path: Path) -> None:
    ranks = run_ranks(2, ["-m", "tests.profiler.ranks_program"], timeout_s=120, XDG_CACHE_HOME=str(tmp_path))
    for rank in ranks:
        assert rank.returncode == 0, rank.output[-5000:]
    (first,), (second,) = (rank.answers() for rank in ranks)
    measured, cached, failed = first["outcomes"]
    assert second["outcomes"] == first["outcomes"], "the same profile, and the same reason, on all ranks"
    assert cached == measured
    profile = HardwareProfile.from_json(measured)
    assert (profile.provenance.ranks, profile.provenance.cores) == (2, 2)
    assert failed.startswith(
        "ProfileError: cpu_adam_params_per_s: is needed for every prediction, found no measurement"
    )
    assert "(rank 1: RuntimeError: broken on purpose)" in failed
    assert [line.split(maxsplit=1)[0] for line in first["log"]] == ["A", "Hardware"]
    assert second["log"] == []
    assert (first["threads"], second["threads"]) == (1, 1)
    assert len(list((tmp_path / "deep_opt_states").iterdir())) == 1
