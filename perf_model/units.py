"""Format quantities for people. Everywhere else, quantities are in bytes, seconds and parameters."""

from __future__ import annotations

import math

GB = 10**9

DIGITS = 2
"""The significant digits of predictions, whose errors are percents."""


def gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / GB:,.1f} GB"


def size(size_bytes: float, digits: int = 3) -> str:
    """Return the size in a unit from kilobytes to terabytes."""
    for unit, unit_bytes in (("TB", 10**12), ("GB", GB), ("MB", 10**6)):
        if float(f"{size_bytes / unit_bytes:.{digits}g}") >= 1:
            return f"{significant(size_bytes / unit_bytes, digits)} {unit}"
    return f"{significant(size_bytes / 1e3, digits)} kB"


def size_of(taken_bytes: float, limit_bytes: float | None) -> str:
    """Return a size and its limit, such as ``83 GB of 85.5 GB``, with enough digits to show which is larger."""
    if limit_bytes is None:
        return f"{size(taken_bytes, DIGITS)} (limit unknown)"

    for digits in range(DIGITS, 17):
        taken, limit = float(f"{taken_bytes:.{digits}g}"), float(f"{limit_bytes:.{max(3, digits)}g}")
        if (taken > limit, taken < limit) == (taken_bytes > limit_bytes, taken_bytes < limit_bytes):
            break
    return f"{size(taken_bytes, digits)} of {size(limit_bytes, max(3, digits))}"


def seconds(duration_s: float, digits: int = 3) -> str:
    """Return the duration in seconds, milliseconds or microseconds."""
    if duration_s < 0:
        return f"-{seconds(-duration_s, digits)}"
    for unit, unit_s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if float(f"{duration_s / unit_s:.{digits}g}") >= 1:
            return f"{significant(duration_s / unit_s, digits)} {unit}"
    return "0 s"


def significant(value: float, digits: int) -> str:
    """Return ``value`` with so many significant digits and no exponent, such as ``1,600`` or ``0.50``."""
    rounded = float(f"{value:.{digits}g}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, decimals)}f}"


def gigabytes_per_second(bytes_per_s: float) -> str:
    """Return the rate in GB/s with at most three significant digits."""
    return f"{_without_exponent(bytes_per_s / GB)} GB/s"


def params_per_second(params_per_s: float) -> str:
    """Return the rate in M or B params/s with at most three significant digits."""
    unit, letter = (1e9, "B") if params_per_s >= 0.9995e9 else (1e6, "M")
    return f"{_without_exponent(params_per_s / unit)} {letter} params/s"


def _without_exponent(rate: float) -> str:
    return f"{float(f'{rate:.3g}'):,.15g}"


def billions(count: float) -> str:
    return f"{count / 1e9:.2f} B"


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, such as ``1 unit`` or ``2 units``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    return f"{share:.0%}"
