"""Check that the ranks agree on plans, on short memory and on failures, and that harm shows where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough

PROGRAM = "tests.software_gpu.filled_gpu.disagreement_ranks"
DIFFERENT_COLLECTIVES = "Detected mismatch between collectives on ranks"


def outcomes(disagreement: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the outcomes of both ranks with the agreement, and those without it."""
    agreed, alone = [], []
    for rank, finished in enumerate(run_ranks(2, ["-m", PROGRAM, disagreement], timeout_s=300)):
        assert finished.returncode == 0 or len(finished.answers()) == 2, f"rank {rank}:\n{finished.output[-4000:]}"
        with_agreement, without = finished.answers()
        agreed.append(with_agreement)
        alone.append(without)
    return agreed, alone


@pytest.mark.thorough
@pytest.mark.promise("P6")
def test_another_plan_of_one_rank_is_an_error_on_every_rank_before_it_runs() -> None:
    agreed, alone = outcomes("plans")
    for outcome in agreed:
        assert outcome["error"].startswith("RanksDisagree: All ranks must run the same plan")
    # Without agreement, the ranks gather other parameters ahead.
    assert any(DIFFERENT_COLLECTIVES in outcome["error"] for outcome in alone)


@pytest.mark.promise("P6")
@pytest.mark.parametrize("disagreement", [thorough("short memory")])
def test_all_ranks_change_their_plan_when_memory_is_short_on_one(disagreement: str) -> None:
    agreed, alone = outcomes(disagreement)
    for outcome in agreed:
        assert (outcome["error"], outcome["differences"]) == ("", [])
        assert outcome["placed"] == agreed[0]["placed"]
        on_cpu = [placed["cpu"] for placed in outcome["placed"]]
        assert min(on_cpu) < on_cpu[-1]
    # Without agreement, one rank wants to exchange budgets while the other computes.
    assert any(DIFFERENT_COLLECTIVES in outcome["error"] for outcome in alone)


@pytest.mark.promise("P6")
@pytest.mark.parametrize("disagreement", [thorough("failures")])
def test_a_failure_on_one_rank_stops_all_ranks_with_its_name(disagreement: str) -> None:
    agreed, alone = outcomes(disagreement)
    for outcome in agreed:
        assert outcome["error"].startswith("UpdateFailed")
    # Without agreement, the other rank waits for the one that has stopped, until that ends.
    assert alone[1]["error"].startswith("UpdateFailed")
    assert alone[0]["error"]
    assert not alone[0]["error"].startswith("UpdateFailed")
