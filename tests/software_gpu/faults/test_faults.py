"""Check that every seeded fault gives wrong numbers on the device, and that no adversary does without a fault."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.software_gpu.faults.adversaries import ADVERSARIES
from tests.software_gpu.faults.shown import EQUIVALENT, HIDDEN, SHOWN_IN
from tests.tiers import thorough
from tests.zero.races.faults import FAULTS

REFUSED = {"offloaded parameters are passed to the accelerator's kernel"}
"""The fault that the kernel itself refuses when it checks its arguments, so that there are no wrong numbers."""


def answers(world_size: int, *arguments: str) -> list[dict[str, Any]]:
    first, *_ = ranks = run_ranks(
        world_size, ["-m", "tests.software_gpu.faults.fault_ranks", *arguments], timeout_s=600
    )
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, f"rank {rank}:\n{process.output[-5000:]}"
    return first.answers()


def test_the_tables_of_faults_name_faults_and_adversaries() -> None:
    names = {fault.name for fault in FAULTS}
    assert names >= SHOWN_IN.keys() | EQUIVALENT.keys()
    assert set(SHOWN_IN.values()) <= ADVERSARIES.keys()


@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_every_seeded_fault_gives_wrong_numbers(world_size: int) -> None:
    found = {answer["fault"]: answer for answer in answers(world_size, "faults")}
    assert found.keys() == {fault.name for fault in FAULTS if fault.world_size == world_size}
    errors = {name: answer["error"] for name, answer in found.items() if answer["error"]}
    assert errors.keys() == REFUSED & found.keys(), errors
    assert all(error.startswith("AssertionError: ('param', device(type='cpu'))") for error in errors.values()), errors
    silent = {name for name, answer in found.items() if not answer["wrong"]}
    assert silent == (REFUSED | HIDDEN) & found.keys()


@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_the_adversaries_that_show_faults_give_the_bits_of_stock_without_them(world_size: int) -> None:
    results = answers(world_size, "controls")
    adversaries = {SHOWN_IN.get(fault.name, "lazy") for fault in FAULTS if fault.world_size == world_size}
    assert {result["adversary"] for result in results} == adversaries
    assert [result for result in results if result["wrong"] or result["error"]] == []


@pytest.mark.parametrize("world_size", [thorough(1), thorough(2)])
def test_the_case_of_every_fault_has_the_bits_of_stock_without_it_in_every_kind_of_adversary(world_size: int) -> None:
    results = answers(world_size, "all", "controls")
    assert {result["adversary"] for result in results} == ADVERSARIES.keys()
    assert [result for result in results if result["wrong"] or result["error"]] == []
