"""How long does the update take, and how many parameters a second is that?

``engine.step()`` of stock ZeRO-3 offload, of its neighbours in DeepSpeed, and of ours by placement, all done when it
returns. Twin-Flow keeps as many bytes of states on the accelerator as ours takes for its slots.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import arms
from benchmarks.machine_profile import measured_profile
from benchmarks.rows import Row
from benchmarks.sizes import usual
from benchmarks.turn_rows import all_of, faster, of_arm, same_bits, waived, what_it_is
from benchmarks.turns import take_turns
from perf_model.bounds import work_bound
from perf_model.cost import CostModel
from perf_model.hardware import HardwareProfile

BYTES_ON_ACCELERATOR = 16
"""Of a parameter that Twin-Flow updates there: p, m, v and its gradient in fp32."""

SLOT_BYTES = 2 * 12


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    iterations, rounds = (2, 1) if quick else (5, 3)
    # Two slots of the largest sub-group.
    slots = min(1.0, setting.sub_group_size * SLOT_BYTES / (BYTES_ON_ACCELERATOR * setting.parameters))
    competitors = (
        arms.STOCK,
        arms.STOCK_BOUND,
        arms.twin_flow(slots),
        arms.SUPER,
        arms.SUPER_UNCLIPPED,
        arms.ZENFLOW,
        arms.STRIDE_2,
        arms.ALL_CPU,
        arms.ALL_STREAMED,
        arms.PLANNED,
    )
    yield from waived(competitors, "update", setting)
    running = [arm for arm in competitors if arm.waived() is None]
    ran = take_turns(running, setting, iterations=iterations, rounds=rounds)
    stock = ran[arms.STOCK.name]
    for name, turns in ran.items():
        of = of_arm(name, setting)
        step_s = all_of(turns, "step_s")
        yield Row(quantity="update", unit="s", samples=step_s, **of)
        per_second = [setting.parameters / its for its in step_s]
        yield Row(quantity="update rate", unit="parameters/s", samples=per_second, **of)
        yield Row(quantity="updates faster than stock", unit="times", samples=faster(turns, stock, "step_s"), **of)
        yield same_bits(turns, stock, **of)
        yield from what_it_is(turns, **of)
    with measured_profile(quick=True) as path:
        bound = work_bound(setting.parameters, CostModel.of(HardwareProfile.read(path)))
    yield Row(arm="lower bound of ours, by the profile", quantity="update", unit="s", samples=[bound.seconds])
    yield Row(arm="lower bound of ours, by the profile", quantity="bound by", said=bound.binding.value)
