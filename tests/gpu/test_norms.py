"""Test that a GPU adds up the squares of norms in stock's order."""

from __future__ import annotations

import torch

from deep_opt_states.zero.step.norms import sums_in_order


def test_sums_have_the_bits_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, dtype=torch.float64, generator=generator).exp() ** 2
    offsets = torch.tensor([0, 3000, 3000, 3001, 5000])
    expected = sums_in_order(values, offsets)
    values, offsets = values.cuda(), offsets.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sums_in_order(values, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), expected)
