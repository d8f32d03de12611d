"""Name the tested releases of DeepSpeed, without importing it."""

from __future__ import annotations

from packaging.version import Version

TESTED_DEEPSPEED = (
    *("0.17.6", "0.18.0", "0.18.1", "0.18.2", "0.18.3", "0.18.4"),
    *("0.18.5", "0.18.6", "0.18.7", "0.18.8", "0.18.9"),
    *("0.19.0", "0.19.1", "0.19.2", "0.19.3", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8"),
)
"""The releases in which ``make compat`` has found the golden cases bit-identical to stock.

Before 0.19.8, NaN in the 16-bit parameters of one case, whose norm is inf or NaN, may have other bits.
"""


def is_tested(deepspeed_version: str) -> bool:
    """Return whether the release was tested. A local build tag (``0.19.8+abc``) is ignored."""
    return deepspeed_version.split("+")[0] in TESTED_DEEPSPEED


def is_too_old(deepspeed_version: str) -> bool:
    return not is_at_least(deepspeed_version, TESTED_DEEPSPEED[0])


def is_at_least(deepspeed_version: str, oldest: str) -> bool:
    return Version(deepspeed_version) >= Version(oldest)
