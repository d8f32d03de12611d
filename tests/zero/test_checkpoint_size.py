"""``torch.save`` of a view would write the whole slab for each tensor in it."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


def test_a_checkpoint_is_as_large_as_stocks() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.checkpoint_size"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    stock, *ours = finished.answers()[0]
    assert stock > 12 * 500_000, "a size that a few kilobytes of names cannot hide"
    assert ours == [pytest.approx(stock, rel=0.01)] * 2
