"""Check that the body of a test runs on ranks, and that its failure is explained."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks, once, ranks


@pytest.mark.parametrize("text", ["given"])
@ranks(1, 2)
def test_a_body_runs_in_a_group_of_ranks_with_the_parameters_of_the_test(text: str, tmp_path: Path) -> None:
    assert text == "given"
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size() == int(os.environ["WORLD_SIZE"])


def name_of_rank(prefix: str) -> str:
    return prefix + os.environ["RANK"] + os.environ.get("SET_BY_TEST", "")


@pytest.mark.parametrize("fresh", [False, True])
def test_ranks_return_values(fresh: bool) -> None:
    assert on_ranks(2, name_of_rank, "rank ", fresh=fresh, group=nullcontext) == ["rank 0", "rank 1"]
    assert on_ranks(1, name_of_rank, "rank ", group=nullcontext, SET_BY_TEST="!") == ["rank 0!"]


def fail_on_rank_1(numbers: list[int]) -> None:
    rank = int(os.environ["RANK"])
    assert numbers[rank] == 10


def test_a_failure_names_the_rank_and_the_values_of_the_assertion() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2 ended with 1:[^$]*assert 11 == 10") as caught:
        on_ranks(2, fail_on_rank_1, [10, 11], group=nullcontext)
    assert "rank 0" not in str(caught.value)


def test_ranks_that_tests_share_are_started_once_also_if_they_fail() -> None:
    calls: list[int] = []

    @once
    def started(world_size: int) -> int:
        calls.append(world_size)
        if world_size == 2:
            pytest.fail("on purpose")
        return 10 * world_size

    assert [started(1), started(1)] == [10, 10]
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match="on purpose"):
            started(2)
    assert calls == [1, 2]
