"""Name the releases of DeepSpeed that the plugin was tested with.

DeepSpeed is not imported here: ``deep-opt-states doctor`` reads these names even if that fails.
"""

from __future__ import annotations

from packaging.version import Version

TESTED_DEEPSPEED = (
    *("0.18.5", "0.18.6", "0.18.7", "0.18.8", "0.18.9"),
    *("0.19.0", "0.19.1", "0.19.2", "0.19.3", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8"),
)
"""The releases that ``make compat`` has tested: the golden cases that a release supports are bit-identical to stock.

The exception is one case before 0.19.8, with a norm that is inf or NaN: NaN in its 16-bit parameters may have other
bits.
"""


def is_tested(deepspeed_version: str) -> bool:
    """Return whether the release was tested. A local build tag (``0.19.8+abc``) is ignored."""
    return deepspeed_version.split("+")[0] in TESTED_DEEPSPEED


def is_too_old(deepspeed_version: str) -> bool:
    """Return whether the release is older than all that were tested."""
    return not is_at_least(deepspeed_version, TESTED_DEEPSPEED[0])


def is_at_least(deepspeed_version: str, oldest: str) -> bool:
    """Return whether ``deepspeed_version`` is the release ``oldest`` or a newer one."""
    return Version(deepspeed_version) >= Version(oldest)
