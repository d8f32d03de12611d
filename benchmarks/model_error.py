"""How far are predictions from what is measured, over a grid of placements and sizes of sub-groups?

With a profile of this machine, measured just before, as a user would. The error is of the whole update, done when
``step()`` returns: predicted over measured, less one; a sample is the median of a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness.arms import AT_ONCE, Arm, ours, planned
from benchmarks.harness.lower_bound import lower_bound
from benchmarks.harness.machine_profile import measured_profile
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import Effort, usual
from benchmarks.harness.turn_rows import failures, of_arm, what_it_is
from benchmarks.harness.turns import take_turns
from deep_opt_states.report.comparison import UPDATE
from perf_model.hardware import HardwareProfile

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SIZES = (1, 4)
"""Of a sub-group, over the usual one."""

PICTURE = Bars("error of the prediction", "update predicted", "update measured")


def measure(*, quick: bool) -> Iterator[Row]:
    base = usual(quick=quick)
    effort = Effort(iterations=3, rounds=1) if quick else Effort(iterations=8, rounds=2)
    with measured_profile(quick=quick) as path:
        profile = HardwareProfile.read(path)
        for size in SIZES:
            setting = replace(base, sub_group_size=size * base.sub_group_size)
            ran = take_turns(_arms(path), setting, effort)
            yield from failures(ran.failed, setting)
            for name, turns in ran.turns.items():
                of = of_arm(name, setting)
                row = partial(Row, **of)
                updates = [its for turn in turns for its in turn.compared if its.what == UPDATE]
                yield row(quantity="update predicted", unit="s", samples=[its.predicted_s for its in updates])
                yield row(quantity="update measured", unit="s", samples=[its.measured_s for its in updates])
                errors = [its.predicted_s / its.measured_s - 1 for its in updates]
                yield row(quantity="error of the prediction", unit="share", samples=errors)
                assert turns[0].workload is not None
                bound = lower_bound(turns[0].workload, setting, profile)
                over = [its.measured_s / bound.seconds for its in updates]
                yield row(quantity="update over its lower bound", unit="times", samples=over)
                yield from what_it_is(turns, **of)


def _arms(profile: Path) -> list[Arm]:
    arms = [planned("planned", profile=str(profile), **AT_ONCE)]
    for share in SHARES:
        block = {"placement": "fraction", "gpu_fraction": share, "profile": str(profile), **AT_ONCE}
        arms.append(ours(f"{share:.0%} streamed", **block))
    return arms
