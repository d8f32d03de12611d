"""Check that states fill the free memory of the GPU, leave it when it is short, and never cost an error or a bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import Finished, run_ranks
from tests.software_gpu.filled_gpu.filled_gpu_ranks import RAMPS
from tests.tiers import thorough

PROGRAM = "tests.software_gpu.filled_gpu.filled_gpu_ranks"


def trained(selection: str, world_size: int) -> list[Finished]:
    """Return the ranks after they have trained the selection."""
    ranks = run_ranks(world_size, ["-m", PROGRAM, selection], timeout_s=600)
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 0, f"rank {rank}:\n{finished.output[-4000:]}"
    return ranks


def by_name(finished: Finished) -> dict[str, dict[str, Any]]:
    return {answer["name"]: answer for answer in finished.answers()}


def on_cpu(answer: dict[str, Any]) -> list[int]:
    """Return the number of units that the CPU updates, after each step."""
    return [placed["cpu"] for placed in answer["placed"]]


def same_on_all_ranks(ranks: list[Finished]) -> list[dict[str, dict[str, Any]]]:
    """Return the answers of each rank. All have stock's bits and the same plans."""
    answers = [by_name(finished) for finished in ranks]
    for name, answer in answers[0].items():
        for other in (ranked[name] for ranked in answers):
            assert (other["error"], other["differences"]) == ("", []), name
            assert other["fingerprints"] == answer["fingerprints"], name
    return answers


def assert_evicted_on_the_last_rank(name: str, answers: list[dict[str, dict[str, Any]]]) -> None:
    evicted = [ranked[name]["evicted"] for ranked in answers]
    assert [sum(rank) for rank in evicted] == [0] * (len(answers) - 1) + [1], "evicted once, on the last rank only"


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_states_fill_the_gpu_and_leave_it_on_all_ranks_when_memory_is_short_on_one(world_size: int) -> None:
    ranks = trained("demotions", world_size)
    answers = same_on_all_ranks(ranks)
    at_start, filled = on_cpu(answers[0]["default"])[0], on_cpu(answers[0]["default"])[-1]
    assert sum(answers[0]["default"]["placed"][0].values()) == at_start > filled
    for name in ("shrinking memory", "retries"):
        cpu = on_cpu(answers[0][name])
        assert min(cpu) == filled < cpu[-1], name
    # All states are evicted on that rank, and the next plan takes at most half of the memory.
    cpu = on_cpu(answers[0]["an allocation that fails"])
    assert min(cpu) == filled < cpu[-1]
    assert any(answers[-1]["an allocation that fails"]["evicted"])
    assert_evicted_on_the_last_rank("larger inputs of one rank", answers)
    assert on_cpu(answers[0]["larger inputs of one rank"])[-1] == filled
    assert "GPU memory for states 0.0 GB -> " in ranks[0].output
    assert ranks[-1].output.count("could not be reserved: a larger gpu_memory_margin_gb") == 1


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize("world_size", [thorough(1), thorough(2)])
def test_evicted_states_return_to_the_gpu_unless_their_memory_cannot_be_reserved_again(world_size: int) -> None:
    answers = same_on_all_ranks(trained("restorations", world_size))
    filled = on_cpu(answers[0]["default"])[-1]
    cpu = on_cpu(answers[0]["no memory afterwards"])
    assert min(cpu) == filled < cpu[-1]
    # The limit keeps the plan small after an allocation that has failed; without it, the same memory is tried again.
    assert on_cpu(answers[0]["no memory afterwards, without a limit"])[-1] == filled
    assert_evicted_on_the_last_rank("larger inputs with a rule", answers)
    assert len(set(answers[0]["larger inputs with a rule"]["fingerprints"])) == 1


def assert_like_stock(answers: dict[str, dict[str, Any]]) -> None:
    for name, answer in answers.items():
        assert (answer["error"], answer["differences"]) == ("", []), name
        assert any(answer["evicted"]), name
        assert min(on_cpu(answer)) < on_cpu(answer)[0], name


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize(
    ("growth", "error", "wrong_bits"),
    [
        ("inputs", "memory is kept before larger inputs", "evicted states are not written back"),
        pytest.param("inputs in a window", None, "open sums are not copied", marks=pytest.mark.thorough),
        pytest.param("cache", "memory in use before a forward is ignored", None, marks=pytest.mark.thorough),
        pytest.param(
            "inputs, parameters in host memory",
            "memory is kept before larger inputs",
            "evicted states are not written back",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_need_that_grows_at_once_is_met_and_not_with_a_fault(
    growth: str, error: str | None, wrong_bits: str | None
) -> None:
    answers = by_name(trained(growth, 1)[0])
    assert answers.keys() == {growth, error, wrong_bits} - {None}
    if error is not None:
        assert answers[error]["error"] == "OutOfMemoryError"
    if wrong_bits is not None:
        assert answers[wrong_bits]["differences"]
    assert_like_stock({growth: answers[growth]})


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize(
    "growth",
    [
        "inputs before the plan holds memory",
        thorough("inputs while the plan takes memory"),
    ],
)
def test_a_need_that_grows_between_the_first_steps_and_the_first_plan_is_met(growth: str) -> None:
    """Check that no memory is taken, since none is free at the peak; with the fault, a plan takes it."""
    answers = by_name(trained(growth, 1)[0])
    found = answers.pop(growth)
    assert (found["error"], found["differences"]) == ("", [])
    assert not takes_memory(found)
    (fault,) = answers.values()
    assert fault["error"] == "OutOfMemoryError" or takes_memory(fault)


def takes_memory(answer: dict[str, Any]) -> bool:
    """Return whether units took memory of the GPU that they did not have after the first step."""
    return min(on_cpu(answer)) < on_cpu(answer)[0]


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize("name", [thorough(name) for name in RAMPS])
def test_inputs_that_grow_never_run_out_of_memory_where_stock_does_not(name: str) -> None:
    answers = by_name(trained(name, 1)[0])
    for fault in RAMPS[name].faults:
        assert answers[fault]["error"] == "OutOfMemoryError"
    assert_like_stock({name: answers[name]})
