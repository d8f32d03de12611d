"""Check that training has the bits of stock: masters, moments, step counts, 16-bit parameters, losses and norms."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deep_opt_states.zero.step.eager import MOST_IN_VAIN
from tests.zero.parity.case import Case
from tests.zero.parity.cases import CASES, DEPARTURES
from tests.zero.parity.naive_rewrites import NAIVE
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

BY_NAME = {case.name: case for case in (*CASES, *DEPARTURES)}
PROGRAM = "tests.zero.parity.parity_ranks"
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


def ranks_of(tier: str) -> ProgramRanks:
    """Return the ranks that train the cases of ``make test`` (``quick``), or all others (``thorough``)."""
    # Fresh ranks hash strings differently, as under a user's launcher: an order that depends on it would differ. One
    # rank has no other to differ from. Four run the code of two, and would import it for 30 s.
    return ProgramRanks(PROGRAM, timeout_s=400, arguments=lambda folder: [tier, str(folder / "results")], fresh=(2, 3))


SELECTIONS = {tier: ranks_of(tier) for tier in ("quick", "thorough")}


def results_of(case: Case, name: str, trained_by_selection: dict[str, TrainingOnce]) -> list[dict[str, Any]]:
    """Return the result that has this name, of the ranks that train ``case``."""
    trained = trained_by_selection["thorough" if case.thorough else "quick"]
    trained.finished(case.world_size)
    results = []
    for rank in range(case.world_size):
        by_name = json.loads((trained.folder(case.world_size) / f"results.{rank}").read_text())
        assert name in by_name, "an earlier case failed"
        assert "error" not in by_name[name], by_name[name]["error"]
        results.append(by_name[name])
    return results


def grouped(name: str, case: Case) -> Any:
    """Return a test parameter such that one worker of pytest-xdist trains all cases of a world size and tier."""
    tier = [pytest.mark.thorough] if case.thorough else []
    program = f"{PROGRAM} thorough" if case.thorough else PROGRAM
    return pytest.param(name, id=name, marks=[*tier, on_one_worker(program, case.world_size)])


@pytest.mark.promise("P1", "P2", "P4")
@pytest.mark.parametrize("name", [grouped(case.name, case) for case in CASES])
def test_training_in_every_placement_and_setting_has_the_bits_of_stock(
    name: str, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    case = BY_NAME[name]
    for rank, result in enumerate(results_of(case, name, trained_by_selection)):
        assert result["stock class"] == STOCK
        for variant, found in result["differences"].items():
            assert result["classes"][variant] == (STOCK if variant.endswith("to stock") else OURS)
            assert found == [], f"rank {rank}, {variant}"
            forwards, units = result["deferred"][variant]
            if variant.endswith("to stock") or "'overlap_forward': False" in variant:
                assert forwards == 0, variant
            else:
                assert forwards >= (case.steps - len(case.poisoned)) // 2, f"{variant}: too few deferred updates"
                assert units >= min(2, len(result["numbers"]["step"])), f"{variant}: forward waited for too few units"
            if "'eager': True" in variant and not (variant.endswith("to stock") or case.caller_accumulates):
                check_speculations(case, result["numbers"]["norm"], *result["speculations"][variant])
        numbers = result["numbers"]
        assert (len(numbers["step"]) >= 4) == (case.sub_group_size < 10**9), "a case must have several sub-groups"
        if case.schedule and case.steps > 5:
            assert len(set(numbers["lr"])) > len({group.lr for group in case.groups})
        assert len(set(numbers["lr"][-len(case.groups) :])) == len({group.lr for group in case.groups})
        if case.clip:
            assert any(case.clip < norm < float("inf") for norm in numbers["norm"]), numbers["norm"]
        if not case.resume:
            assert numbers["skipped"][-1] >= len(case.poisoned)


def check_speculations(case: Case, norms: list[float], kept: int, void: int) -> None:
    """Check that steps of eager units were speculated, and were in vain exactly if the step was another one."""
    unlikely = [norm for norm in norms if not norm <= (case.clip or math.inf)]
    assert kept + void > 0
    assert kept > 0 or len(unlikely) > MOST_IN_VAIN
    assert void > 0 or not unlikely


@pytest.mark.parametrize("name", [grouped(case.name, case) for case in DEPARTURES])
def test_a_missing_gradient_is_zero_where_stock_reuses_the_last_one(
    name: str, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    """Check the departure from stock. When stock no longer differs, the departure is obsolete."""
    for rank, result in enumerate(results_of(BY_NAME[name], name, trained_by_selection)):
        for variant, found in result["differences"].items():
            assert found == [], f"rank {rank}, {variant}"
        assert result["stock differs"], f"rank {rank}"


@pytest.mark.parametrize("name", [grouped(name, BY_NAME[case]) for name, (case, *_) in NAIVE.items()])
def test_every_naive_rewrite_changes_bits_in_some_case(
    name: str, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    ranks = results_of(BY_NAME[NAIVE[name][0]], name, trained_by_selection)
    assert any(result["differences"]["naive"] for result in ranks)
