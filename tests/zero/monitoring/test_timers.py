"""DeepSpeed's throughput timer does not wait for work in flight during forward, unless the user requests that.

That request is logged, because of its price.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from deep_opt_states.zero.internals import timers


class TimerConfig:
    """The attributes of a ``DeepSpeedConfig`` that are read."""

    def __init__(self, written: dict[str, Any]) -> None:
        self._param_dict = written
        self.timers_config = DeepSpeedThroughputTimerConfig(**written.get("timers", {}).get("throughput", {}))


@pytest.mark.parametrize(
    ("written", "synchronized", "logged"),
    [
        ({}, False, []),
        ({"timers": {"throughput": {"synchronized": True}}}, True, ["waits for the whole device"]),
        ({"timers": {"throughput": {"synchronized": False}}}, False, []),
        ({"timers": {"throughput": {"enabled": False}}}, True, []),
    ],
)
def test_the_timer_waits_for_the_device_only_if_the_user_requests_it(
    written: dict[str, Any], synchronized: bool, logged: list[str]
) -> None:
    config = TimerConfig(written)
    with mock.patch("deep_opt_states.log.warn") as log:
        timers.unsynchronize_throughput_timer(config)
    assert config.timers_config.synchronized == synchronized
    messages = [call.args[0] for call in log.call_args_list]
    assert len(messages) == len(logged)
    assert all(part in message for part, message in zip(logged, messages, strict=True))
