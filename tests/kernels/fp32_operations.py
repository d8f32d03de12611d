"""Compute the fused multiply-add of fp32 arrays, the only operation of the GPU kernel that numpy lacks."""

from __future__ import annotations

import numpy as np


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
