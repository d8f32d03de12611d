"""How far are predictions from what is measured, over a grid of placements and sizes of sub-groups?

With a profile of this machine, measured just before, as a user would. The error is of the whole update, done when
``step()`` returns: predicted over measured, less one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from benchmarks.harness.arms import AT_ONCE, ours
from benchmarks.harness.machine_profile import measured_profile
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import usual
from benchmarks.harness.turns import take_turn
from deep_opt_states.report.comparison import UPDATE
from perf_model.bounds import work_bound
from perf_model.cost import CostModel
from perf_model.hardware import HardwareProfile

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SIZES = (1, 4)
"""Of a sub-group, over the usual one."""

PICTURE = Bars("error of the prediction", "update predicted", "update measured")


def measure(*, quick: bool) -> Iterator[Row]:
    base = usual(quick=quick)
    iterations = 3 if quick else 10
    with measured_profile(quick=quick) as path:
        cost = CostModel.of(HardwareProfile.read(path))
        for size in SIZES:
            setting = replace(base, sub_group_size=size * base.sub_group_size)
            about = {**asdict(setting), "parameters": setting.parameters}
            arms = [ours("planned", profile=str(path), **AT_ONCE)]
            for share in SHARES:
                block = {"placement": "fraction", "gpu_fraction": share, "profile": str(path), **AT_ONCE}
                arms.append(ours(f"{share:.0%} streamed", **block))
            for arm in arms:
                turn = take_turn(arm, setting, iterations)
                (update,) = (its for its in turn.compared if its.what == UPDATE)
                row = partial(Row, arm=arm.name, setting=about)
                yield row(quantity="update predicted", unit="s", samples=[update.predicted_s])
                yield row(quantity="update measured", unit="s", samples=[update.measured_s])
                bound = work_bound(setting.parameters, cost)
                over = update.measured_s / bound.seconds
                yield row(quantity="update over its lower bound", unit="times", samples=[over])
                error = update.predicted_s / update.measured_s - 1
                yield row(quantity="error of the prediction", unit="share", samples=[error])
