"""Where does the time of ``step()`` go? The result is a profiler trace of two iterations, and its sums by operation.

The variants are stock, ours with everything updated on the CPU before ``step()`` returns, and ours with the default
config. Perfetto (https://ui.perfetto.dev) opens the traces. They have spans named "forward", "backward" and "step", and
one for each action of our schedule. Profiling itself takes time: the other benchmarks measure how long a phase takes.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import variants
from benchmarks.harness.charts import Bars
from benchmarks.harness.interleaved_runs import batch_for, engine_for, warm_up_iterations
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import labels_of
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.sizes import default_setting
from benchmarks.harness.variants import Variant

STEP = "step"
PROFILED = 2
"""Number of iterations in a trace."""

LEAST_SHARE = 0.03
"""Smallest share of ``step()`` for which an operation has a row of its own."""

CHART = Bars(("in step(): *",), ("during step(), on another thread: *",))


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the trace of each variant, and the seconds of ``step()`` by operation."""
    setting = default_setting(quick=quick)
    for variant in (variants.STOCK, variants.ALL_CPU, variants.OURS_DEFAULT):
        labels = labels_of(variant.name, setting)
        profiled, configuration = _profile(variant, setting)
        # Spans also appear as events of the device.
        events = [event for event in profiled.events() if event.device_type == DeviceType.CPU]
        steps = [event for event in events if event.name == STEP]
        total_s = sum(map(_seconds, steps))
        yield Row(quantity="step(), profiled", unit="s", samples=[_seconds(step) for step in steps], **labels)
        this_thread, other_threads = _seconds_by_operation(events, steps)
        parts = {name: spent_s for name, spent_s in this_thread if spent_s >= LEAST_SHARE * total_s}
        for name, spent_s in parts.items():
            yield Row(quantity=f"in step(): {name}", unit="s", samples=[spent_s / len(steps)], **labels)
        rest_s = total_s - sum(parts.values())
        yield Row(quantity="in step(): other", unit="s", samples=[rest_s / len(steps)], **labels)
        for name, spent_s in other_threads:
            if spent_s >= LEAST_SHARE * total_s:
                quantity = f"during step(), on another thread: {name}"
                yield Row(quantity=quantity, unit="s", samples=[spent_s / len(steps)], **labels)
        yield Row(quantity="trace", trace=_trace(profiled), **labels)
        yield Row(quantity="configuration", value=configuration, **labels)


def _profile(variant: Variant, setting: TrainingSetting) -> tuple[Any, str]:
    """Return the profile of ``PROFILED`` iterations, and the configuration of the engine."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with engine_for(variant, setting) as engine:
        configuration = variant.verify(engine)
        warm_up = warm_up_iterations()
        for number in range(warm_up):
            _iterate(engine, setting, number)
        # Our worker thread updates, and the profiler records only the calling thread by default.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=every_thread) as profiled:
            for number in range(warm_up, warm_up + PROFILED):
                _iterate(engine, setting, number)
    return profiled, configuration


def _iterate(engine: Any, setting: TrainingSetting, number: int) -> None:
    inputs, targets = batch_for(engine, setting, number)
    with record_function("forward"):
        loss = engine(inputs, targets)
    with record_function("backward"):
        engine.backward(loss)
    with record_function(STEP):
        engine.step()


def _seconds_by_operation(
    events: list[Any], steps: list[Any]
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Return the seconds by operation on the thread of ``steps``, and on all other threads, longest first.

    Events count that begin within a step, each without the events that it called. The time of the step itself, without
    its calls, is spent in Python and waiting for other threads.
    """
    spent_s: dict[bool, defaultdict[str, float]] = {same: defaultdict(float) for same in (True, False)}
    for event in events:
        if any(step.time_range.start <= event.time_range.start < step.time_range.end for step in steps):
            name = "Python and waiting" if event.name == STEP else event.name.rstrip(" 0123456789")
            spent_s[event.thread == steps[0].thread][name] += event.self_cpu_time_total / 1e6
    this_thread, other_threads = (
        sorted(spent_s[same].items(), key=lambda part: part[1], reverse=True) for same in (True, False)
    )
    return this_thread, other_threads


def _seconds(event: Any) -> float:
    return float(event.time_range.elapsed_us()) / 1e6


def _trace(profiled: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiled.export_chrome_trace(str(path))
        return path.read_bytes()
