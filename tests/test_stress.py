"""The search for races says what it found, and how to find it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import stress

FAULTY = """
from hypothesis import given, note
from tests.model.strategies import schedules

@given(schedules())
def test_claims_that_nothing_is_ever_flushed(drawn):
    note(f"{drawn[0]}")
    assert "FLUSH_STATES" not in str(drawn[0])
"""


def test_a_failure_is_told_with_its_seed_and_the_shrunk_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = tmp_path / "test_faulty.py"
    faulty.write_text(FAULTY)
    monkeypatch.setattr(stress, "SCHEDULE_TESTS", [faulty])
    monkeypatch.setattr(stress, "SEARCHES", (stress.schedules,))
    assert stress.main(["--seed", "17", "--minutes", "5"]) == 1
    told = capsys.readouterr().out
    assert "FAILED: schedules with seed 17. Again: make stress SEED=17 MINUTES=0" in told
    shrunk = told[told.index("schedule slots") :].splitlines()
    assert [line.split("E ")[-1].strip().split(" slot")[0] for line in shrunk[1:4]] == [
        "PREFETCH 0",
        "GPU_STEP 0",
        "FLUSH_STATES 0",
    ]
