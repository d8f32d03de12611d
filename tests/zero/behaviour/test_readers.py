"""Check that DeepSpeed's readers and writers of states see the same as with stock, also right after ``step()``."""

from __future__ import annotations

from tests.launch import run_ranks


def test_deepspeeds_readers_and_writers_see_the_bits_of_stock() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.behaviour.reader_ranks"], timeout_s=200):
        assert finished.returncode == 0, finished.output[-4000:]
        assert "all readers agree" in finished.output
