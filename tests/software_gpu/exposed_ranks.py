"""Train on an emulated slow link, and print how long the model waits for each update: as reported, and as traced.

Argument: ``fault``, if the waits of the model's stream for the gathering stream are not to be reported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator

from deep_opt_states.runtime.action_events import ActionEvents
from deep_opt_states.zero.step.exposure import UpdateWaits
from perf_model.prediction.timeline import Phase, seconds_of
from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import MachineRates, Settings
from tests.zero.parity.case import STREAMED, Case
from tests.zero.parity.training import closing_engine, shared_folder, train

DEFAULT_PREFETCH_BUCKET = {"stage3_prefetch_bucket_size": 50_000_000}

LINK_BYTES_PER_S, LAUNCH_S = 1.5e5, 1e-3
"""The states take 0.6 s in each direction. A forward has about 20 kernels, and a gather a few."""

MODEL_STREAM = 0


@dataclass
class Observed:
    """The updates of one engine: the reports, and when each update begins and ends, in emulated seconds."""

    reported_s: list[float] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)


@contextmanager
def observed(engine: Any) -> Iterator[Observed]:
    found = Observed()
    report, executor = engine.optimizer.report, engine.optimizer._running.executor
    lanes = executor._lanes
    updated, wait_for_caller = report.updated, lanes.wait_for_caller
    order_after_update, wait_until_drained = lanes.order_after_update, lanes.wait_until_drained

    def observed_report(phases: Any, timeline: Any) -> None:
        found.reported_s.append(seconds_of(Phase.EXPOSED, phases))
        updated(phases, timeline)

    def observed_begin(events: ActionEvents) -> None:
        wait_for_caller(events)
        found.begins_s.append(device.call("now_s"))

    def observed_end() -> None:
        order_after_update()
        # The host waits for the model's stream, which now waits for the update, but not for its flushes.
        get_accelerator().current_stream().synchronize()
        found.ends_s.append(device.call("now_s"))

    def observed_end_on_host() -> None:
        wait_until_drained()
        if executor.pending:
            found.ends_s.append(device.call("now_s"))

    with (
        mock.patch.object(lanes, "wait_until_drained", observed_end_on_host),
        mock.patch.object(report, "updated", observed_report),
        mock.patch.object(lanes, "wait_for_caller", observed_begin),
        mock.patch.object(lanes, "order_after_update", observed_end),
    ):
        yield found


def idle_s(spans: list[device.TaskSpan], begin_s: float, end_s: float) -> float:
    """Return how long the model's stream executes nothing between the two moments."""
    idle, now_s = 0.0, begin_s
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.stream == MODEL_STREAM and span.name != "wait" and span.end_s > now_s and span.start_s < end_s:
            idle += max(0.0, span.start_s - now_s)
            now_s = span.end_s
    return idle + max(0.0, end_s - now_s)


def main(fault: str = "") -> None:
    case = Case(name="exposed", blocks=(STREAMED,), steps=6, zero=DEFAULT_PREFETCH_BUCKET, extra={"steps_per_print": 1})
    rates = MachineRates(h2d=LINK_BYTES_PER_S, d2h=LINK_BYTES_PER_S, launch_s=LAUNCH_S)
    not_reported = mock.patch.object(UpdateWaits, "for_gathering_stream", return_value=nullcontext())
    with (
        plugged(Settings(rates=rates, execute_first=True, trace=True)),
        shared_folder() as folder,
        closing_engine(case, STREAMED) as engine,
        not_reported if fault else nullcontext(),
        observed(engine) as found,
    ):
        train(engine, case, folder)
        engine.optimizer._update.close()
        spans = device.take_spans()
    for reported_s, begin_s, end_s in zip(found.reported_s, found.begins_s, found.ends_s, strict=True):
        answer({"reported": reported_s, "idle": idle_s(spans, begin_s, end_s)})


if __name__ == "__main__":
    with software_process_group():
        main(*sys.argv[1:])
