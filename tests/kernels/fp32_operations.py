"""Compute with fp32 and fp16 arrays as a GPU does: each operation rounds once, keeps denormals, and has a single NaN.

numpy rounds sums, products, quotients, square roots and conversions correctly, but has no fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NANS = {
    np.dtype(np.float32): np.uint32(0x7FFFFFFF).view(np.float32),
    np.dtype(np.float16): np.uint16(0x7FFF).view(np.float16),
}
"""The bits that a GPU gives to every result that is NaN."""


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z, rounded once to float32.

    The exact result is rounded to odd in float64, and then to float32. This is correct because float64 has more than
    twice the bits of float32, plus two (Boldo, Melquiond).
    """
    x, y, z = (np.asarray(operand, dtype=np.float32).astype(np.float64) for operand in (x, y, z))
    product_ = x * y  # exact: 48 bits
    total = product_ + z
    rounded_z = total - product_
    error = (product_ - (total - rounded_z)) + (z - rounded_z)
    even = np.asarray(total).view(np.int64) % 2 == 0
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, odd, total).astype(np.float32)


def with_one_nan(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return ``compute`` with a GPU's NaN in place of every NaN that x86 propagates or generates."""

    def computed(*operands: np.ndarray) -> np.ndarray:
        result = compute(*operands)
        return np.where(np.isnan(result), NANS[result.dtype], result)

    return computed
