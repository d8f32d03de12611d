"""The search for races says what it found, and how to find it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import stress
from tests.launch import Finished
from tests.zero.parity.random_case import SIMPLER, simplified

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


def test_a_failure_of_the_engine_is_shrunk_to_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 139 fails, whatever is taken away but accumulation and the second group."""
    needed = {"no_accumulation", "one_group"}
    asked: list[list[str]] = []

    def recorded(world_size: int, cases: list[str]) -> str | None:
        asked.append(cases)
        bad = [case for case in cases if case.startswith("139") and not needed & set(case.split(","))]
        return f"{world_size} ranks, {bad}" if bad else None

    monkeypatch.setattr(stress, "recorded", recorded)
    smallest = ",".join(["139", *(name for name in SIMPLER if name not in needed)])
    found = stress.engine(17)
    assert found == f"3 ranks, ['{smallest}']\n3 ranks: python -m tests.zero.scripts.recorded {smallest}"
    assert asked[0] == [str(number) for number in range(136, 144)]


def test_every_simplification_is_made() -> None:
    for seed in range(20):
        simple = simplified(seed, 1, list(SIMPLER))
        assert (simple.steps, simple.accumulation, simple.clip, len(simple.groups), simple.zero) == (2, 1, 0.0, 1, {})
        assert (simple.dtype, len(simple.widths), simple.frozen, simple.unused) == ("bf16", 3, False, False)
        assert simple.ds_config(simple.blocks[0])["deep_optimizer_states"]["num_slots"] == 1


def test_all_of_a_bad_answer_is_told_and_so_is_a_crash() -> None:
    answer = {
        "case": "random 3",
        "block": {"placement": "cpu"},
        "schedule": "schedule slots 0",
        "findings": [[{"rule": "order"}], []],
        "differences": [[], ["loss"]],
    }
    said = stress.told(answer)
    for part in ("random 3", "'cpu'", "schedule slots 0", "rank 0: {'rule': 'order'}", "rank 1: loss"):
        assert part in said
    good = Finished(0, "ANSWER 1\n")
    assert stress._problem([good, good], [], 1) is None
    assert "boom" in str(stress._problem([good, Finished(1, "boom")], [], 1))
    assert "0 answers of 1" in str(stress._problem([Finished(0, "")], [], 1))
