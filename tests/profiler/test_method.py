"""Test warm-up, repetitions and ranks: the slowest rank counts, and a failure on one rank stops all ranks."""

from __future__ import annotations

import time

import pytest

from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.profiler.probes import ProbeError, Rates
from deep_opt_states.profiler.profile import ProbeEffort, sample
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from tests.profiler.threads import on_ranks

EFFORT = ProbeEffort(
    warm_ups=2,
    min_samples=3,
    max_samples=10,
    budget_s=1.0,
    update_numel=8000,
    launch_numel=8000,
    copy_bytes=4096,
    matrix_size=16,
)


class Counting:
    """A probe whose n-th repetition returns a rate and a time of ``base`` + n, and whose ``fails_at``-th raises."""

    def __init__(self, base: float = 0, fails_at: int | None = None) -> None:
        self._next = base
        self._fails_at = fails_at

    def __call__(self) -> Rates:
        self._next += 1
        if self._next == self._fails_at:
            raise MemoryError("no [memory]\nat all")
        return {"h2d_bytes_per_s": self._next, "copy_latency_s": self._next}


@pytest.mark.parametrize(("one_s", "expected"), [(5.0, 3), (0.2, 5), (0.001, 10), (0.0, 10)])
def test_the_number_of_repetitions_fills_the_budget_within_its_bounds(one_s: float, expected: int) -> None:
    assert EFFORT.repetitions(one_s) == expected


def test_warm_ups_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    probe = Counting()
    samples = sample(lambda: probe, EFFORT, Ranks())
    assert [rates["h2d_bytes_per_s"] for rates in samples] == list(range(3, 13))


def test_the_slowest_rank_counts_in_each_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    outcomes = on_ranks(3, lambda ranks: sample(lambda: Counting(base=[5, 0, 9][ranks.rank]), EFFORT, ranks))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    # The smallest rate is rank 1's, the longest time rank 2's.
    assert outcomes[0][0] == {"h2d_bytes_per_s": 3, "copy_latency_s": 12}


@pytest.mark.parametrize("fails_at", [1, 4], ids=["in the warm-up", "later"])
def test_a_failure_on_one_rank_is_raised_on_all_ranks(fails_at: int) -> None:
    def program(ranks: Ranks) -> object:
        return sample(lambda: Counting(fails_at=fails_at) if ranks.rank == 1 else Counting(), EFFORT, ranks)

    outcomes = on_ranks(3, program)
    assert [type(outcome) for outcome in outcomes] == [ProbeError] * 3
    assert {str(outcome) for outcome in outcomes} == {"rank 1: MemoryError: no [memory]"}


def test_a_probe_that_cannot_be_prepared_on_one_rank_fails_on_all_ranks() -> None:
    def prepare(ranks: Ranks) -> Counting:
        if ranks.rank == 0:
            raise RuntimeError("out of memory")
        return Counting()

    outcomes = on_ranks(2, lambda ranks: sample(lambda: prepare(ranks), EFFORT, ranks))
    assert {str(outcome) for outcome in outcomes} == {"rank 0: RuntimeError: out of memory"}


def test_the_message_of_a_single_rank_does_not_name_the_rank() -> None:
    with pytest.raises(ProbeError, match=r"^KeyError: 'key'$") as caught:
        call_on_all_ranks(Ranks(), lambda: {}["key"])
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_remedy_of_a_kernel_that_is_unavailable_is_kept() -> None:
    def unavailable() -> None:
        raise KernelUnavailable("The kernel cannot be loaded.\nIt needs ninja (pip install ninja).")

    with pytest.raises(ProbeError, match=r"^The kernel cannot be loaded. It needs ninja \(pip install ninja\).$"):
        call_on_all_ranks(Ranks(), unavailable)
