"""Check that every seeded fault is found by the race check and by wrong numbers, and nothing without a fault."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.software_gpu.faults.adversaries import ADVERSARIES
from tests.software_gpu.faults.faults import FAULTS, Fault
from tests.tiers import thorough


def answers(world_size: int, *arguments: str) -> list[dict[str, Any]]:
    first, *_ = ranks = run_ranks(
        world_size, ["-m", "tests.software_gpu.faults.fault_ranks", *arguments], timeout_s=600
    )
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, f"rank {rank}:\n{process.output[-5000:]}"
    return first.answers()


def faults(world_size: int) -> dict[str, Fault]:
    return {fault.name: fault for fault in FAULTS if fault.world_size == world_size}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_race_check_reports_every_seeded_fault(world_size: int) -> None:
    found = {answer["fault"]: answer for answer in answers(world_size, "races")}
    assert found.keys() == faults(world_size).keys()
    for name, fault in faults(world_size).items():
        races, error = found[name]["races"], found[name]["error"]
        if fault.refused:
            # The kernel refuses its arguments.
            assert error.startswith(fault.refused), name
        else:
            assert any(map(fault.is_shown_by, races)), f"{name}: {races} {error}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_race_check_reports_nothing_without_a_fault(world_size: int) -> None:
    found = answers(world_size, "no races")
    assert len(found) == len(faults(world_size))
    assert [answer for answer in found if answer["races"] or answer["error"]] == []


@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_every_seeded_fault_gives_wrong_numbers(world_size: int) -> None:
    found = {answer["fault"]: answer for answer in answers(world_size, "faults")}
    assert found.keys() == {name for name, fault in faults(world_size).items() if fault.adversary is not None}
    assert [answer for answer in found.values() if answer["error"] or not answer["wrong"]] == []


@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_the_adversaries_that_show_faults_give_the_bits_of_stock_without_them(world_size: int) -> None:
    results = answers(world_size, "controls")
    adversaries = {fault.adversary for fault in faults(world_size).values()} - {None}
    assert {result["adversary"] for result in results} == adversaries
    assert [result for result in results if result["wrong"] or result["error"]] == []


@pytest.mark.parametrize("world_size", [thorough(1), thorough(2)])
def test_the_case_of_every_fault_has_the_bits_of_stock_without_it_in_every_kind_of_adversary(world_size: int) -> None:
    results = answers(world_size, "all", "controls")
    assert {result["adversary"] for result in results} == ADVERSARIES.keys()
    assert [result for result in results if result["wrong"] or result["error"]] == []
