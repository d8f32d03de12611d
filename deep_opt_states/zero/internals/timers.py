"""DeepSpeed's timers, some of which wait for the whole device, and so for an update that could go on in forward."""

from __future__ import annotations

from typing import Any

from deep_opt_states.zero.internals.compat import param_dict
from deep_opt_states.zero.internals.log import say


def let_updates_go_on(ds_config: Any) -> None:
    """The throughput timer synchronises the device twice a step unless the user says not to: here, if the user does."""
    timer = ds_config.timers_config
    if timer.enabled and timer.synchronized:
        if "synchronized" in param_dict(ds_config).get("timers", {}).get("throughput", {}):
            say(
                '"timers": {"throughput": {"synchronized": true}} waits for the whole device in each step: updates on '
                "the GPU do not go on beside the next forward"
            )
        else:
            timer.synchronized = False
            say(
                "DeepSpeed's throughput timer goes by the host's clock, so that updates go on beside the next forward; "
                'to have it wait for the device, set "timers": {"throughput": {"synchronized": true}}'
            )


def end_with_the_step(ds_config: Any) -> bool:
    """DeepSpeed's breakdown is into forward, backward and ``step()``. An update that went on in forward would be timed
    as forward, where the model waits for it: what is timed phase by phase runs phase by phase."""
    if ds_config.wall_clock_breakdown:
        say(
            '"wall_clock_breakdown": true times step() with all of the update in it, which does not go on beside the '
            "next forward then"
        )
    return bool(ds_config.wall_clock_breakdown)
