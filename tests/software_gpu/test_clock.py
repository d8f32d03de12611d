"""Check the rules of the time model on a clock that does not depend on how fast this machine is."""

from __future__ import annotations

import ctypes

import pytest

from tests.software_gpu.library import RESOURCES, UNLIMITED, Amounts, amounts, call
from tests.software_gpu.ranks import on_device

H2D, D2H, COMPUTE, NONE = range(4)
"""Values of ``Engine`` in ``csrc/clock.h``."""

Work = tuple[int, dict[str, float], float, float]
"""The engine of a piece of work, what it uses, the moment at which it starts or later, and its latency."""


def work(engine: int, start_s: float = 0.0, latency_s: float = 0.0, **used: float) -> Work:
    return engine, used, start_s, latency_s


def ends_of(capacities: dict[str, float], *works: Work) -> object:
    """Return when each of ``works`` ends on an idle machine whose other resources are unlimited.

    The clock has a resolution of a nanosecond.
    """
    count = len(works)
    doubles = ctypes.c_double * count
    ends = doubles()
    engines, used, start_s, latency_s = zip(*works, strict=True)
    call(
        "simulate",
        count,
        Amounts(*(capacities.get(name, UNLIMITED) for name in RESOURCES)),
        (ctypes.c_int32 * count)(*engines),
        (ctypes.c_double * (count * len(RESOURCES)))(*(amount for each in used for amount in amounts(**each))),
        doubles(*latency_s),
        doubles(*start_s),
        ends,
    )
    return pytest.approx(list(ends), abs=1e-8)


@on_device
def test_an_engine_executes_its_work_in_order_beside_the_other_engines() -> None:
    assert ends_of({}, work(H2D, 2, 0.5, h2d=30)) == [2.5]
    works = [
        work(H2D, h2d=10),
        work(H2D, 0.5, 0.25, h2d=20),
        work(H2D, 9, h2d=10),
        work(D2H, d2h=10),
        work(COMPUTE, gpu=3),
    ]
    assert ends_of({"h2d": 10, "d2h": 5, "gpu": 1}, *works) == [1, 3.25, 10, 2, 3]


@on_device
def test_copies_and_updates_of_the_cpu_share_the_link_and_host_memory() -> None:
    link = {"h2d": 10, "d2h": 10, "both_directions": 15}
    up, down = work(H2D, h2d=30, both_directions=30), work(D2H, d2h=30, both_directions=30)
    assert ends_of(link, up, down) == [4, 4]
    # The longer copy has the link for itself once the shorter one has ended, after 2 s at 7.5 bytes per second.
    assert ends_of(link, up, work(D2H, d2h=15, both_directions=15)) == [3.5, 2]
    assert ends_of({**link, "both_directions": 20}, up, down) == [3, 3]
    machine = {"h2d": 50, "host_memory": 100, "cpu": 1, "gpu": 1}
    update, copy = work(NONE, cpu=1, host_memory=100), work(H2D, h2d=50, host_memory=50)
    # Each alone would take 1 s. Work that does not use the full resource is not slowed down.
    assert ends_of(machine, update, copy, work(COMPUTE, gpu=1)) == [1.5, 1.5, 1]


@on_device
def test_work_that_is_added_late_ends_as_if_it_had_been_added_in_time() -> None:
    """Add work after the clock has passed its start, as a thread does that was woken late."""
    machine = {"h2d": 10, "d2h": 10, "both_directions": 15}
    late = [work(H2D, number * 1.5, 0.5, h2d=10) for number in range(20)]
    assert ends_of(machine, work(NONE, 50), *late) == [50, *(1.5 * (number + 1) for number in range(20))]
    # A flow that runs is slowed down for the time in which it should have shared the link.
    up, down = work(H2D, h2d=30, both_directions=30), work(D2H, d2h=30, both_directions=30)
    assert ends_of(machine, up, work(NONE, 1), down) == [4, 1, 4]
