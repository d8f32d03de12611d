"""An engine adds slots beyond the plan's while memory is free, releases them when it is short, and logs both."""

from __future__ import annotations

from tests.launch import run_ranks


def test_slots_follow_the_free_memory_and_the_bits_are_stocks() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.memory.headroom_ranks"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    followed, refused = finished.answers()
    # The plan has one slot. The first steps only measure the free memory.
    assert followed == {"differences": [], "slots": [1, 1, 1, 1, 4, 4, 3, 3, 3]}
    assert refused == {"differences": [], "slots": [1] * 9}
    assert "4 slots from now on, 3 beyond the plan's" in finished.output
    assert "3 slots from now on, 2 beyond the plan's" in finished.output
    assert finished.output.count("GPU memory is short: no slots beyond the plan's") == 1
