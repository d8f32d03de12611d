"""Yield master weights that are difficult to split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tests.kernels.adversarial_tensors import adversarial_numbers

LOWER_HALVES = np.array([0x8000] * 4 + [0, 1, 0x7FFF, 0x8001, 0xFFFF], np.uint32)


def masters_of_every_kind(numel: int, chance: np.random.Generator) -> Iterator[torch.Tensor]:
    """Yield fp32 masters: ties in every element, subnormals, numbers close to overflow, zeros, and of all kinds."""
    upper = chance.integers(0, 2**16, numel, dtype=np.uint32) << np.uint32(16)
    sign = chance.integers(0, 2, numel, dtype=np.uint32) << np.uint32(31)
    lower = chance.choice(LOWER_HALVES, numel)
    for bits in (
        upper | np.uint32(0x8000),
        sign | chance.integers(0, 2**7, numel, dtype=np.uint32) << np.uint32(16) | lower,
        sign | np.uint32(0x7F700000) | chance.integers(0, 16, numel, dtype=np.uint32) << np.uint32(16) | lower,
        sign,
        np.full(numel, 0x3F808000, np.uint32),
    ):
        yield torch.from_numpy(bits.view(np.float32).copy())
    yield adversarial_numbers(numel, chance)
