"""How long does the update take, and how many parameters a second is that?

``engine.step()`` of stock ZeRO-3 offload, of its neighbours in DeepSpeed, and of ours by placement; and of stock and
ours with DeepSpeed's default size of sub-groups. The update is done when it returns; of those that update in backward,
too, or in the next iterations, it says nothing. Beside the least that ours can take, and the bytes of host memory that
an update moves by the model of it: where memory binds, and nothing else takes time, stock's over ours is the gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import arms
from benchmarks.harness.aims import FASTER, FASTER_BY_BYTES
from benchmarks.harness.lower_bound import lower_bound
from benchmarks.harness.machine_profile import measured_profile
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import effort, usual, with_default_sub_groups
from benchmarks.harness.turn_rows import all_of, faster, of_arm, rows_of, running, same_bits, waived
from benchmarks.harness.turns import Turn, take_turns
from perf_model.prediction.cost import stock_traffic_of, traffic_of
from perf_model.prediction.hardware import HardwareProfile
from perf_model.schedule.action import ActionKind
from perf_model.training_run.job import PARAM_BYTES

PICTURE = Bars("update", "updates faster than stock", "host memory moved")

MOVED = {
    arms.STOCK.name: stock_traffic_of(PARAM_BYTES)[ActionKind.CPU_STEP].dram,
    arms.ALL_CPU.name: traffic_of(PARAM_BYTES)[ActionKind.CPU_STEP].dram,
}
"""Bytes a parameter by the CPU's update, of arms that do nothing else."""


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    with measured_profile(quick=quick) as path:
        profile = HardwareProfile.read(path)
    in_place = profile.measurements["dram_update_bytes_per_s"].samples
    yield Row(quantity="host memory moved", unit="bytes/s", samples=in_place, **of_arm("by the profile", setting))
    for measured, compared in (
        (setting, arms.competitors(setting)),
        (with_default_sub_groups(setting), (arms.STOCK, arms.ALL_CPU, arms.PLANNED)),
    ):
        yield from waived(compared, "update", measured)
        ran = take_turns(running(compared, measured), measured, effort(quick=quick))
        yield from rows_of(ran, partial(_rows, profile))


def _rows(profile: HardwareProfile, turns: Sequence[Turn], stock: Sequence[Turn], **of: Any) -> Iterator[Row]:
    arm, setting = turns[0].arm, turns[0].setting
    step_s = all_of(turns, "step_s")
    if not arm.done:
        yield Row(quantity="step(), not all of the update", unit="s", samples=step_s, **of)
        return
    yield Row(quantity="update", unit="s", samples=step_s, **of)
    per_second = [setting.parameters / its for its in step_s]
    yield Row(quantity="update rate", unit="parameters/s", samples=per_second, **of)
    yield Row(quantity=FASTER, unit="times", samples=faster(turns, stock, "step_s"), **of)
    if (moved := MOVED.get(arm.name)) is not None:
        yield Row(quantity="host memory moved, by the model", unit="bytes a parameter", samples=[moved], **of)
        most = MOVED[arms.STOCK.name] / moved
        yield Row(quantity=FASTER_BY_BYTES, unit="times", samples=[most], **of)
        yield Row(quantity="host memory moved", unit="bytes/s", samples=[moved * rate for rate in per_second], **of)
    if (workload := turns[0].workload) is not None:
        bound = lower_bound(workload, setting, profile)
        yield Row(quantity="lower bound", unit="s", samples=[bound.seconds], **of)
        yield Row(quantity="bound by", said=bound.binding.value, **of)
        over = [its / bound.seconds for its in step_s]
        yield Row(quantity="update over its lower bound", unit="times", samples=over, **of)
    yield same_bits(turns, stock, **of)
