"""DeepSpeed's throughput timer does not end what goes on in forward, unless the user has asked for that; it is said."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from deep_opt_states.zero.internals import timers


class Config:
    """What is read of a ``DeepSpeedConfig``."""

    def __init__(self, written: dict[str, Any]) -> None:
        self._param_dict = written
        self.timers_config = DeepSpeedThroughputTimerConfig(**written.get("timers", {}).get("throughput", {}))


@pytest.mark.parametrize(
    ("written", "synchronized", "said"),
    [
        ({}, False, ["goes by the host's clock"]),
        ({"timers": {"throughput": {"synchronized": True}}}, True, ["waits for the whole device"]),
        ({"timers": {"throughput": {"synchronized": False}}}, False, []),
        ({"timers": {"throughput": {"enabled": False}}}, True, []),
    ],
)
def test_the_timer_waits_for_the_device_only_if_asked_to(
    written: dict[str, Any], synchronized: bool, said: list[str]
) -> None:
    config = Config(written)
    with mock.patch.object(timers, "say") as say:
        timers.let_updates_go_on(config)
    assert config.timers_config.synchronized == synchronized
    messages = [call.args[0] for call in say.call_args_list]
    assert len(messages) == len(said)
    assert all(part in message for part, message in zip(said, messages, strict=True))
