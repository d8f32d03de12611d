"""Check that a checkpoint has the size of stock.

``torch.save`` of a view would write the whole slab for each tensor.
"""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


@pytest.mark.promise("P4")
def test_a_checkpoint_has_the_size_of_stock() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.checkpoints.checkpoint_size_ranks"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    stock, *ours = finished.answers()[0]
    assert stock > 12 * 500_000, "too small: a few kilobytes of names could hide a difference"
    assert ours == [pytest.approx(stock, rel=0.01)] * 2
