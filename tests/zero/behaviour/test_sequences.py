"""Check that any sequence of calls between updates sees the same as with stock."""

from __future__ import annotations

import pytest

from tests.ranks import on_ranks, ranks
from tests.zero.behaviour.sequence_ranks import NAIVE, trained, trained_naively
from tests.zero.on_accelerator import GROUPS


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("on", "world_size", "seeds"),
    [
        ("cpu", 1, range(2)),
        ("cpu", 2, range(2, 4)),
        ("software_gpu", 1, range(1)),
        pytest.param("cpu", 2, range(4, 6), marks=pytest.mark.thorough),
        pytest.param("software_gpu", 1, range(1, 9), marks=pytest.mark.thorough),
        pytest.param("software_gpu", 2, range(2, 8), marks=pytest.mark.thorough),
    ],
)
def test_random_sequences_of_calls_see_the_bits_of_stock(on: str, world_size: int, seeds: range) -> None:
    on_ranks(world_size, compare_sequences, seeds, group=GROUPS[on], timeout_s=900)


def compare_sequences(seeds: range) -> None:
    pending = 0
    for seed in seeds:
        found = trained(seed)
        assert found["differences"] == [], found
        pending += found["pending"]
    assert pending > 5 * len(seeds), "too few calls while an update was pending"


@ranks(1)
def test_sequences_of_calls_notice_each_wait_that_is_removed() -> None:
    for name in NAIVE:
        assert trained_naively(name)["differences"], name
