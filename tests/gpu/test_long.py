"""Test the real engine on CUDA: 200 steps have stock's bits, and so has every repetition."""

from __future__ import annotations

import pytest

from tests.gpu.engine import LONG, LONG_RUNS, trained
from tests.gpu.one_by_one import Answers


@pytest.fixture(scope="module")
def found() -> Answers:
    return trained(list(LONG_RUNS))


@pytest.mark.parametrize("name", LONG_RUNS)
def test_200_steps_have_the_same_bits(name: str, found: Answers) -> None:
    answer = found.result(name)
    assert len(answer["numbers"]["step"]) == len(LONG.blocks[0]["placement"])
    assert len(set(answer["numbers"]["loss"])) > 100, "the loss changes"
    for variant, differ in answer["differences"].items():
        assert differ == [], variant


def test_the_process_of_the_long_runs_exits_without_an_error(found: Answers) -> None:
    assert found.ending == ""
