"""How far are predictions from what is measured, over a grid of placements and sizes of sub-groups?

With a profile of this machine, measured just before, as a user would. The error is of the whole update, done when
``step()`` returns: predicted over measured, less one; a sample is the median of a turn. All of ``step()`` stands beside
the least that an update can take. The plan comes first: where time is bounded, the grid may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.arms import AT_ONCE, Arm, ours, planned
from benchmarks.harness.lower_bound import lower_bound
from benchmarks.harness.machine_profile import measured_profile
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import Effort, usual
from benchmarks.harness.turn_rows import all_of, rows_of
from benchmarks.harness.turns import Turn, take_turns
from deep_opt_states.report.comparison import UPDATE
from perf_model.prediction.hardware import HardwareProfile

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
            plan, *grid = _arms(path)
            for arms in ([plan], grid):
                yield from rows_of(take_turns(arms, setting, effort), partial(_rows, profile))


def _rows(profile: HardwareProfile, turns: Sequence[Turn], stock: Sequence[Turn], **of: Any) -> Iterator[Row]:
    """Stock has no part in it."""
    updates = [its for turn in turns for its in turn.compared if its.what == UPDATE]
    yield Row(quantity="update predicted", unit="s", samples=[its.predicted_s for its in updates], **of)
    yield Row(quantity="update measured", unit="s", samples=[its.measured_s for its in updates], **of)
    errors = [its.predicted_s / its.measured_s - 1 for its in updates]
    yield Row(quantity="error of the prediction", unit="share", samples=errors, **of)
    assert turns[0].workload is not None
    bound = lower_bound(turns[0].workload, turns[0].setting, profile)
    over = [its / bound.seconds for its in all_of(turns, "step_s")]
    yield Row(quantity="update over its lower bound", unit="times", samples=over, **of)


def _arms(profile: Path) -> list[Arm]:
    arms = [planned("planned", profile=str(profile), **AT_ONCE)]
    for share in SHARES:
        block = {"placement": "fraction", "gpu_fraction": share, "profile": str(profile), **AT_ONCE}
        arms.append(ours(f"{share:.0%} streamed", **block))
    return arms
