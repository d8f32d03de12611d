"""Check that the search for races prints each failure, shrunk, and the command that repeats it."""

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


def test_a_failure_is_printed_with_its_seed_and_the_shrunk_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = tmp_path / "test_faulty.py"
    faulty.write_text(FAULTY)
    monkeypatch.setattr(stress, "SCHEDULE_TESTS", [faulty])
    monkeypatch.setattr(stress, "SEARCHES", (stress.schedules,))
    assert stress.main(["--seed", "17", "--minutes", "5"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: schedules with seed 17. Repeat with: make stress SEED=17 MINUTES=0" in printed
    shrunk = printed[printed.index("schedule slots") :].splitlines()
    assert [line.split("E ")[-1].strip().split(" slot")[0] for line in shrunk[1:4]] == [
        "PREFETCH 0",
        "GPU_STEP 0",
        "FLUSH_STATES 0",
    ]


def test_a_failing_case_of_the_engine_is_shrunk_to_the_settings_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that case 139, which fails with accumulation and two groups only, keeps these and loses everything else."""
    needed = {"no_accumulation", "one_group"}
    requested: list[list[str]] = []

    def run_under_race_check(world_size: int, cases: list[str]) -> str | None:
        requested.append(cases)
        bad = [case for case in cases if case.startswith("139") and not needed & set(case.split(","))]
        return f"{world_size} ranks, {bad}" if bad else None

    monkeypatch.setattr(stress, "run_under_race_check", run_under_race_check)
    smallest = ",".join(["139", *(name for name in SIMPLER if name not in needed)])
    found = stress.engine(17)
    assert found == f"3 ranks, ['{smallest}']\n3 ranks: python -m tests.software_gpu.races.race_ranks {smallest}"
    assert requested[0] == [str(number) for number in range(136, 144)]


def test_every_simplification_takes_effect() -> None:
    for seed in range(20):
        simple = simplified(seed, 1, list(SIMPLER))
        assert (simple.steps, simple.accumulation, simple.clip, len(simple.groups), simple.zero) == (2, 1, 0.0, 1, {})
        assert (simple.dtype, len(simple.widths), simple.frozen, simple.unused) == ("bf16", 3, False, False)
        assert simple.ds_config(simple.blocks[0])["deep_optimizer_states"]["num_slots"] == 1


def test_every_part_of_a_failed_answer_and_a_crash_is_printed() -> None:
    answer = {
        "case": "random 3",
        "block": {"placement": "cpu"},
        "schedule": "schedule slots 0",
        "races": [["a write and a read are not ordered"], []],
        "differences": [[], ["loss"]],
    }
    description = stress.format_answer(answer)
    for part in ("random 3", "'cpu'", "schedule slots 0", "rank 0: a write and a read", "rank 1: loss"):
        assert part in description
    good = Finished(0, "ANSWER 1\n")
    assert stress._problem([good, good], [], 1) is None
    assert "boom" in str(stress._problem([good, Finished(1, "boom")], [], 1))
    assert "0 answers of 1" in str(stress._problem([Finished(0, "")], [], 1))


def test_rounds_are_counted_until_the_time_is_over_or_a_search_fails() -> None:
    seen: list[int] = []

    def fails_at_12(seed: int) -> str | None:
        seen.append(seed)
        return "late" if seed == 12 else None

    found = stress.search_for(60, 10, [fails_at_12])
    assert seen == [10, 11, 12]
    assert (found.rounds, found.failed, found.problem) == (2, "fails_at_12", "late")
    found = stress.search_for(0, 10, [fails_at_12])
    assert (found.rounds, found.failed) == (1, None)


def test_a_search_alone_is_repeated_by_its_own_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress, "_sequence", lambda *arguments: f"{arguments}")
    assert stress.main(["--only", "sequences_on_lazy_gpu", "--seed", "5", "--minutes", "0"]) == 1
    printed = capsys.readouterr().out
    assert "(2, 5, '--on', 'software_gpu', '--adversary', 'lazy')" in printed
    assert "python -m tests.stress --minutes 0 --seed 5 --only sequences_on_lazy_gpu" in printed
