"""How long does the update take, and how many parameters per second is that?

The time is that of ``engine.step()`` of stock ZeRO-3 offloading, of DeepSpeed's other ways to offload, and of ours by
placement; stock and ours also run with DeepSpeed's default sub-group size. The update is done when ``step()`` returns.
For variants that also update in backward or in the next iterations, the time is not that of the whole update, and has
another label.

The times of ours are compared with the lower bound of an update. The rows also have the bytes of host memory that an
update moves according to the model: if the update is memory-bound, stock's bytes divided by ours are the speedup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import variants
from benchmarks.harness.charts import Bars
from benchmarks.harness.device import trains_on_gpu
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import (
    all_samples,
    labels_of,
    rows_of_runs,
    runnable,
    same_bits_row,
    speedups,
    waived_rows,
)
from benchmarks.harness.setting import TrainingSetting, measured_profile
from benchmarks.harness.sizes import default_setting, repetitions, with_default_sub_groups
from benchmarks.harness.targets import MEMORY_BOUND_SPEEDUP, UPDATE_SPEEDUP
from perf_model.prediction.cost import CostModel, stock_traffic_by_action, traffic_by_action
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.work_bound import Bound, work_bound
from perf_model.schedule.action import ActionKind
from perf_model.schedule.workload import Workload

CHART = Bars("update", UPDATE_SPEEDUP, "host memory traffic")

TRAFFIC_BYTES = {
    variants.STOCK.name: stock_traffic_by_action()[ActionKind.CPU_STEP].dram,
    variants.ALL_CPU.name: traffic_by_action()[ActionKind.CPU_STEP].dram,
}
"""Bytes per parameter that the CPU's update moves, for variants that update on the CPU only."""


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the bandwidth that the profile measures, then the update times of each variant."""
    setting = default_setting(quick=quick)
    with measured_profile(quick=quick) as path:
        profile = HardwareProfile.read(path)
    in_place = profile.measurements["dram_update_bytes_per_s"].samples
    labels = labels_of("hardware profile", setting)
    yield Row(quantity="host memory traffic", unit="bytes/s", samples=in_place, **labels)
    for measured, compared in (
        (setting, variants.competitors(setting)),
        (with_default_sub_groups(setting), (variants.STOCK, variants.ALL_CPU, variants.PLANNED)),
    ):
        yield from waived_rows(compared, "update", measured)
        runs = run_interleaved(runnable(compared, measured), measured, repetitions(quick=quick))
        yield from rows_of_runs(runs, partial(_rows, profile))


def _rows(
    profile: HardwareProfile, runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any
) -> Iterator[Row]:
    variant, setting = runs[0].variant, runs[0].setting
    step_s = all_samples(runs, "step_s")
    if not variant.done_in_step:
        yield Row(quantity="step(), a part of the update", unit="s", samples=step_s, **labels)
        return
    yield Row(quantity="update", unit="s", samples=step_s, **labels)
    rates = [setting.parameters / duration_s for duration_s in step_s]
    yield Row(quantity="update rate", unit="parameters/s", samples=rates, **labels)
    yield Row(quantity=UPDATE_SPEEDUP, unit="times", samples=speedups(runs, stock_runs, "step_s"), **labels)
    if (traffic_bytes := TRAFFIC_BYTES.get(variant.name)) is not None:
        quantity = "modelled host memory traffic"
        yield Row(quantity=quantity, unit="bytes per parameter", samples=[traffic_bytes], **labels)
        speedup = TRAFFIC_BYTES[variants.STOCK.name] / traffic_bytes
        yield Row(quantity=MEMORY_BOUND_SPEEDUP, unit="times", samples=[speedup], **labels)
        bytes_per_s = [traffic_bytes * rate for rate in rates]
        yield Row(quantity="host memory traffic", unit="bytes/s", samples=bytes_per_s, **labels)
    if (plan := runs[0].plan) is not None:
        bound = lower_bound(plan.workload, setting, profile)
        yield Row(quantity="lower bound", unit="s", samples=[bound.seconds], **labels)
        yield Row(quantity="limiting resource", value=bound.binding.value, **labels)
        ratios = [duration_s / bound.seconds for duration_s in step_s]
        yield Row(quantity="update / lower bound", unit="times", samples=ratios, **labels)
    yield same_bits_row(runs, stock_runs, **labels)


def lower_bound(workload: Workload, setting: TrainingSetting, profile: HardwareProfile) -> Bound:
    """Return the lower bound of an update of ours, according to a profile of this machine.

    Sub-groups may be resident in all the memory that ``setting`` gives to a variant. If the CPU is the accelerator, it
    has no memory of its own.
    """
    gpu_bytes = setting.accelerator_bytes if trains_on_gpu() else 0
    return work_bound(workload, CostModel.from_profile(profile), gpu_bytes)
