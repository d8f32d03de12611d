"""Right after ``step()``, every reader and writer of DeepSpeed sees what it would see with stock."""

from __future__ import annotations

from tests.launch import run_ranks


def test_readers_and_writers_agree_with_stock() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.scripts.readers"], timeout_s=200):
        assert finished.returncode == 0, finished.output[-4000:]
        assert "all readers agree" in finished.output
