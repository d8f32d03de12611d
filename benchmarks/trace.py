"""Where do the seconds of ``step()`` go? A profile trace of two iterations to look at, and what it sums up to.

Of stock, ours with all updated on the CPU when ``step()`` returns, and ours as it is. Each trace opens in Perfetto
(https://ui.perfetto.dev); spans "forward", "backward" and "step", and one for each action of our schedule, are in it.
Profiling itself takes time: how long a phase takes is for the other benchmarks to say.
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

from benchmarks.harness import arms
from benchmarks.harness.arms import Arm
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.setting import Setting
from benchmarks.harness.sizes import usual
from benchmarks.harness.turn_rows import of_arm
from benchmarks.harness.turns import WARM_UP, batch_of, engine_of

STEP = "step"
PROFILED = 2
"""Iterations."""

LEAST_SHARE = 0.03
"""Of ``step()``, to be told by itself."""

PICTURE = Bars(("in step(): *",), ("beside, by another thread: *",))


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    for arm in (arms.STOCK, arms.ALL_CPU, arms.OURS_AS_IT_IS):
        of = of_arm(arm.name, setting)
        profiled, said = _profiled(arm, setting)
        # Spans are told of the device, too.
        events = [event for event in profiled.events() if event.device_type == DeviceType.CPU]
        steps = [event for event in events if event.name == STEP]
        lasted_s = sum(map(_seconds, steps))
        yield Row(quantity="step(), profiled", unit="s", samples=[_seconds(step) for step in steps], **of)
        here, beside = _parts(events, steps)
        parts = {name: spent_s for name, spent_s in here if spent_s >= LEAST_SHARE * lasted_s}
        for name, spent_s in parts.items():
            yield Row(quantity=f"in step(): {name}", unit="s", samples=[spent_s / len(steps)], **of)
        rest_s = lasted_s - sum(parts.values())
        yield Row(quantity="in step(): the rest", unit="s", samples=[rest_s / len(steps)], **of)
        for name, spent_s in beside:
            if spent_s >= LEAST_SHARE * lasted_s:
                yield Row(quantity=f"beside, by another thread: {name}", unit="s", samples=[spent_s / len(steps)], **of)
        yield Row(quantity="trace", trace=_trace(profiled), **of)
        yield Row(quantity="is", said=said, **of)


def _profiled(arm: Arm, setting: Setting) -> tuple[Any, str]:
    """And what the engine is."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with engine_of(arm, setting) as engine:
        said = arm.check(engine)
        for number in range(WARM_UP):
            _iterate(engine, setting, number)
        # The worker that updates is a thread of its own.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=every_thread) as profiled:
            for number in range(WARM_UP, WARM_UP + PROFILED):
                _iterate(engine, setting, number)
    return profiled, said


def _iterate(engine: Any, setting: Setting, number: int) -> None:
    inputs, targets = batch_of(engine, setting, number)
    with record_function("forward"):
        loss = engine(inputs, targets)
    with record_function("backward"):
        engine.backward(loss)
    with record_function(STEP):
        engine.step()


def _parts(events: list[Any], steps: list[Any]) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Seconds by name of what began in one of ``steps``, each without what it called: on its thread, and on others. The
    step itself is one: Python, and where it waits for the others."""
    spent_s: dict[bool, defaultdict[str, float]] = {here: defaultdict(float) for here in (True, False)}
    for event in events:
        if any(step.time_range.start <= event.time_range.start < step.time_range.end for step in steps):
            name = "Python, and waits" if event.name == STEP else event.name.rstrip(" 0123456789")
            spent_s[event.thread == steps[0].thread][name] += event.self_cpu_time_total / 1e6
    here, beside = (sorted(spent_s[its].items(), key=lambda part: part[1], reverse=True) for its in (True, False))
    return here, beside


def _seconds(event: Any) -> float:
    return float(event.time_range.elapsed_us()) / 1e6


def _trace(profiled: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiled.export_chrome_trace(str(path))
        return path.read_bytes()
