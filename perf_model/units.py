"""The only place that converts units for people; everywhere else they are bytes, seconds and parameters."""

from __future__ import annotations

GB = 10**9


def gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / GB:,.1f} GB"


def size(size_bytes: float) -> str:
    """Three digits, from kilobytes to terabytes."""
    for unit, unit_bytes in (("TB", 10**12), ("GB", GB), ("MB", 10**6)):
        if size_bytes >= 0.9995 * unit_bytes:
            return f"{size_bytes / unit_bytes:#.3g}".rstrip(".") + f" {unit}"
    return f"{size_bytes / 1e3:.3g} kB"


def seconds(duration_s: float) -> str:
    """Three digits."""
    if duration_s < 0:
        return f"-{seconds(-duration_s)}"
    for unit, unit_s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if duration_s >= 0.9995 * unit_s:
            return f"{duration_s / unit_s:#.3g}".rstrip(".") + f" {unit}"
    return "0 s"


def gigabytes_a_second(bytes_per_s: float) -> str:
    """Three digits."""
    return f"{bytes_per_s / GB:.3g} GB/s"


def params_a_second(params_per_s: float) -> str:
    """Three digits."""
    unit, letter = (1e9, "B") if params_per_s >= 0.9995e9 else (1e6, "M")
    return f"{params_per_s / unit:.3g} {letter} params/s"


def billions(count: float) -> str:
    return f"{count / 1e9:.2f} B"


def percent(share: float) -> str:
    return f"{share:.0%}"
