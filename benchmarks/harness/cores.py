"""Count the cores that a benchmark may use."""

from __future__ import annotations

import os

from deep_opt_states.host.machine import cgroup_folders, core_quota


def usable_cores() -> int:
    """Return how many logical CPUs this process can keep busy, by its affinity and the time of its cgroup."""
    allowed, quota = len(os.sched_getaffinity(0)), core_quota(cgroup_folders("cpu"))
    return allowed if quota is None else max(1, min(allowed, int(quota)))
