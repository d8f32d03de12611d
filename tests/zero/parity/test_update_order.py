"""Check that units are updated in the order in which forward uses them, once DeepSpeed has recorded it."""

from __future__ import annotations

from tests.launch import run_ranks


def test_updates_follow_the_order_of_forward_and_keep_the_bits_of_stock() -> None:
    ranks = run_ranks(2, ["-m", "tests.zero.parity.update_order_ranks"], timeout_s=120)
    for finished in ranks:
        assert finished.returncode == 0, finished.output[-4000:]
        overlapped, at_once = finished.answers()
        assert overlapped["differences"] == []
        assert at_once["differences"] == []
        by_index, as_used = overlapped["published"]
        assert sorted(as_used) == sorted(by_index)
        # The second param group's first layers come before the first group's last ones.
        assert as_used != by_index
        # Without overlap no forward waits for the update, so the order is not changed, and no unit is persistent.
        assert by_index[0] == 0
        assert at_once["published"] == [[unit - 1 for unit in by_index[1:]]]
        assert overlapped["published"] == ranks[0].answers()[0]["published"], "the orders of the ranks differ"
