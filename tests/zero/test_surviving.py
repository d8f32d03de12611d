"""What must not end or disturb training, on two ranks."""

from __future__ import annotations

from tests.launch import run_ranks


def test_training_survives() -> None:
    first, second = run_ranks(2, ["-m", "tests.zero.scripts.surviving"], timeout_s=120)
    for finished in (first, second):
        assert finished.returncode == 0, finished.output[-4000:]
        for said in (
            "trained with another default dtype",
            "trained without reports",
            "scheduled without complaint",
            "gave the slots back",
        ):
            assert said in finished.output
    assert first.output.count("deep_optimizer_states.report: the update cannot be reported there") == 1
    assert "/proc/nowhere" not in second.output
