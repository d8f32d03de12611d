"""How long does the update take, and how many parameters a second is that?

``engine.step()`` of stock ZeRO-3 offload, of its neighbours in DeepSpeed, and of ours by placement, all done when it
returns. Twin-Flow keeps as many bytes of states on the accelerator as ours takes for its slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from benchmarks import arms
from benchmarks.machine_profile import measured_profile
from benchmarks.rows import Row
from benchmarks.sizes import usual
from benchmarks.turns import Turn, take_turn, take_turns
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
    ran: dict[str, list[Turn]] = {}
    for arm in competitors:
        if (reason := arm.waived()) is not None:
            yield Row(arm=arm.name, quantity="update", waived=reason)
    running = [arm for arm in competitors if arm.waived() is None]
    for turn in take_turns(running, rounds, partial(take_turn, setting=setting, iterations=iterations)):
        ran.setdefault(turn.arm.name, []).append(turn)
    yield from rows(ran, asdict(setting))
    with measured_profile(quick=True) as path:
        bound = work_bound(setting.parameters, CostModel.of(HardwareProfile.read(path)))
    yield Row(arm="lower bound of ours, by the profile", quantity="update", unit="s", samples=[bound.seconds])
    yield Row(arm="lower bound of ours, by the profile", quantity="bound by", said=bound.binding.value)


def rows(ran: dict[str, list[Turn]], setting: dict[str, object]) -> Iterator[Row]:
    stock = ran[arms.STOCK.name]
    for name, turns in ran.items():
        about = {**setting, "parameters": turns[0].parameters}
        step_s = [its for turn in turns for its in turn.step_s]
        yield Row(arm=name, quantity="update", unit="s", samples=step_s, setting=about)
        per_second = [turns[0].parameters / its for its in step_s]
        yield Row(arm=name, quantity="update rate", unit="parameters/s", samples=per_second, setting=about)
        ratios = [
            theirs / its
            for other, turn in zip(stock, turns, strict=True)
            for theirs, its in zip(other.step_s, turn.step_s, strict=True)
        ]
        yield Row(arm=name, quantity="updates faster than stock", unit="times", samples=ratios, setting=about)
        same = all(turn.same_bits_as(stock[0]) for turn in turns)
        yield Row(arm=name, quantity="stock's bits", said=same, claimed=turns[0].arm.exact, setting=about)
        yield Row(arm=name, quantity="is", said=turns[0].settings, setting=about)
        if turns[0].plan:
            yield Row(arm=name, quantity="plan", said=turns[0].plan, setting=about)
