"""How long does the update take, and how many parameters a second is that?

``engine.step()`` of stock ZeRO-3 offload, of its neighbours in DeepSpeed, and of ours by placement. The update is done
when it returns; of those that update in backward, too, or in the next iterations, it says nothing. Beside the least
that ours can take, and the bytes of host memory that an update moves by the model of it: where memory binds, no kernel
can gain more than they say.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import arms
from benchmarks.harness.lower_bound import lower_bound
from benchmarks.harness.machine_profile import measured_profile
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import effort, usual
from benchmarks.harness.turn_rows import all_of, failures, faster, of_arm, running, same_bits, waived, what_it_is
from benchmarks.harness.turns import take_turns
from perf_model.action import ActionKind
from perf_model.cost import stock_traffic_of, traffic_of
from perf_model.hardware import HardwareProfile

PICTURE = Bars("update", "updates faster than stock", "host memory moved")

PARAM_BYTES = 2
MOVED = {
    arms.STOCK.name: stock_traffic_of(PARAM_BYTES)[ActionKind.CPU_STEP].dram,
    arms.ALL_CPU.name: traffic_of(PARAM_BYTES)[ActionKind.CPU_STEP].dram,
}
"""Bytes a parameter by the CPU's update, of arms that do nothing else."""


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    compared = arms.competitors(setting)
    yield from waived(compared, "update", setting)
    with measured_profile(quick=quick) as path:
        profile = HardwareProfile.read(path)
    ran = take_turns(running(compared, setting), setting, effort(quick=quick))
    yield from failures(ran.failed, setting)
    stock = ran.turns[arms.STOCK.name]
    for name, turns in ran.turns.items():
        of = of_arm(name, setting)
        step_s = all_of(turns, "step_s")
        if not turns[0].arm.done:
            yield Row(quantity="step(), not all of the update", unit="s", samples=step_s, **of)
            yield from what_it_is(turns, **of)
            continue
        yield Row(quantity="update", unit="s", samples=step_s, **of)
        per_second = [setting.parameters / its for its in step_s]
        yield Row(quantity="update rate", unit="parameters/s", samples=per_second, **of)
        yield Row(quantity="updates faster than stock", unit="times", samples=faster(turns, stock, "step_s"), **of)
        if (workload := turns[0].workload) is not None:
            bound = lower_bound(workload, setting, profile)
            over = [its / bound.seconds for its in step_s]
            yield Row(quantity="update over its lower bound", unit="times", samples=over, **of)
        if moved := MOVED.get(name):
            yield Row(quantity="host memory moved, by the model", unit="bytes a parameter", samples=[moved], **of)
            bandwidths = [moved * rate for rate in per_second]
            yield Row(quantity="host memory moved", unit="bytes/s", samples=bandwidths, **of)
        yield same_bits(turns, stock, **of)
        yield from what_it_is(turns, **of)
    of_profile = of_arm("by the profile", setting)
    yield Row(quantity="update", unit="s", samples=[bound.seconds], **of_profile)
    yield Row(quantity="bound by", said=bound.binding.value, **of_profile)
    in_place = profile.measurements["dram_update_bytes_per_s"].samples
    yield Row(quantity="host memory moved", unit="bytes/s", samples=in_place, **of_profile)
