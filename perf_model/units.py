"""The only place that converts units. Everywhere else: bytes, seconds, parameters, and rates of these.

GB is 10^9 bytes, as vendors and DeepSpeed count; GiB is 2^30 bytes, as memory is sold.
"""

from __future__ import annotations

GB = 10**9
GIB = 2**30
BILLION = 10**9
TFLOP = 10**12


def gb(value_bytes: float) -> str:
    """``61.2 GB``."""
    return f"{value_bytes / GB:,.1f} GB"


def gb_per_s(value_bytes_per_s: float) -> str:
    """``24.3 GB/s``."""
    return f"{value_bytes_per_s / GB:,.1f} GB/s"


def params(numel: float) -> str:
    """``11.3 B``, ``100 M``, ``12,345``."""
    if numel >= BILLION:
        return f"{numel / BILLION:.1f} B"
    if numel >= 10**6:
        return f"{numel / 10**6:.0f} M"
    return f"{numel:,.0f}"


def params_per_s(value: float) -> str:
    """``2.10 B/s``."""
    return f"{value / BILLION:.2f} B/s"


def seconds(value_s: float) -> str:
    """``1.25 s``, ``12.3 ms``, ``8.1 us``: three figures that count."""
    if value_s >= 1:
        return f"{value_s:.2f} s"
    if value_s >= 1e-3:
        return f"{value_s * 1e3:.1f} ms"
    return f"{value_s * 1e6:.1f} us"
