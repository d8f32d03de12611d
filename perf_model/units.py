"""The only place that converts units for people; everywhere else they are bytes, seconds and parameters."""

from __future__ import annotations

GB = 10**9


def gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / GB:,.1f} GB"


def seconds(duration_s: float) -> str:
    """Three digits."""
    for unit, unit_s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if duration_s >= 0.9995 * unit_s:
            return f"{duration_s / unit_s:#.3g}".rstrip(".") + f" {unit}"
    return "0 s"


def billions(count: float) -> str:
    return f"{count / 1e9:.2f} B"


def percent(share: float) -> str:
    return f"{share:.0%}"
