"""Check on two ranks that disturbances of a script or the file system do not end or change training."""

from __future__ import annotations

from tests.launch import run_ranks


def test_a_default_dtype_an_unwritable_report_and_a_client_scheduler_do_not_disturb_training() -> None:
    first, second = run_ranks(2, ["-m", "tests.zero.failures.disturbed_ranks"], timeout_s=120)
    for finished in (first, second):
        assert finished.returncode == 0, finished.output[-4000:]
        for line in (
            "trained with another default dtype",
            "trained without reports",
            "scheduled without a warning",
            "freed the staging slots",
        ):
            assert line in finished.output
    assert first.output.count("deep_optimizer_states.report: the update cannot be reported there") == 1
    assert "/proc/nowhere" not in second.output
