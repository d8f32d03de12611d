"""Check the spans that profilers show, and that DeepSpeed's throughput timer waits only if the user requests that.

Spans are emitted where DeepSpeed emits its own. ``test_monitoring`` checks that PyTorch's profiler shows them.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import nvtx
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from torch._C._profiler import _ExperimentalConfig

from deep_opt_states.zero.internals import spans, timers


class NvtxAccelerator:
    """DeepSpeed's accelerator for CUDA, with or without the package ``nvtx``, as far as spans use it."""

    def __init__(self, *, supports_nvtx_domain: bool) -> None:
        self.supports_nvtx_domain = supports_nvtx_domain
        self.calls: list[tuple[Any, ...]] = []

    def range_push(self, message: str, domain: str | None = None) -> None:
        self.calls.append((message, domain))

    def range_pop(self, domain: str | None = None) -> None:
        self.calls.append(("pop", domain))


def all_threads() -> Any:
    return torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))


def test_a_profiler_may_be_started_and_stopped_inside_a_span() -> None:
    profiler = all_threads()
    with spans.ActionSpan("begun before"):
        profiler.start()
    with spans.ActionSpan("inside"):
        time.sleep(0.001)
    with spans.ActionSpan("ended after"):
        profiler.stop()
    (inside,) = (event for event in profiler.events() if event.name == "inside")
    assert inside.time_range.elapsed_us() > 0
    with all_threads(), spans.ActionSpan("once more"):
        pass


@pytest.mark.parametrize(("supports", "domain"), [(True, "DeepSpeed"), (False, None)])
def test_a_span_is_in_the_domain_of_deepspeed_and_ends_if_its_action_fails(supports: bool, domain: str | None) -> None:
    accelerator = NvtxAccelerator(supports_nvtx_domain=supports)
    with mock.patch.object(spans, "get_accelerator", return_value=accelerator):
        with spans.ActionSpan("PREFETCH 3"):
            pass
        with pytest.raises(OSError, match="out of memory"), spans.ActionSpan("CPU_STEP 4"):
            raise OSError("out of memory")
        with mock.patch.object(nvtx, "enable_nvtx", False), spans.ActionSpan("PUBLISH 4"):
            pass
    assert accelerator.calls == [("PREFETCH 3", domain), ("pop", domain), ("CPU_STEP 4", domain), ("pop", domain)]


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
