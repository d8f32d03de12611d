"""Keep DeepSpeed's timers from waiting for an update that may continue in the next forward."""

from __future__ import annotations

from typing import Any

from deep_opt_states import log
from deep_opt_states.zero.internals.compat import param_dict


def unsynchronize_throughput_timer(ds_config: Any) -> None:
    """Make the throughput timer use the host's clock, unless the user has set ``synchronized`` to true."""
    timer = ds_config.timers_config
    if not (timer.enabled and timer.synchronized):
        return
    if "synchronized" in param_dict(ds_config).get("timers", {}).get("throughput", {}):
        log.warn(
            '"timers": {"throughput": {"synchronized": true}} waits for the whole device in each step: updates on the '
            "GPU are not overlapped with the next forward"
        )
        return
    timer.synchronized = False


def breakdown_forbids_deferring(ds_config: Any) -> bool:
    """Return whether DeepSpeed times ``step()`` separately, so that updates must end in it; log the consequence."""
    if ds_config.wall_clock_breakdown:
        log.warn(
            '"wall_clock_breakdown", which "flops_profiler" enables as well, times step() with the whole update in it: '
            "updates are not overlapped with the next forward"
        )
    return bool(ds_config.wall_clock_breakdown)
