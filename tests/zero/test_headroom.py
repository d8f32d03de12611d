"""An engine takes slots beyond the plan's where there is room, gives them back where there is none, and says so."""

from __future__ import annotations

from tests.launch import run_ranks


def test_slots_follow_the_room_that_is_left_and_the_bits_are_stocks() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.headroom"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    followed, refused = finished.answers()
    # The plan has one; the first steps are only watched.
    assert followed == {"differences": [], "slots": [1, 1, 1, 1, 4, 4, 3, 3, 3]}
    assert refused == {"differences": [], "slots": [1] * 9}
    assert "4 slots from now on, 3 beyond the plan's" in finished.output
    assert "3 slots from now on, 2 beyond the plan's" in finished.output
    assert finished.output.count("GPU memory is short: no slots beyond the plan's") == 1
