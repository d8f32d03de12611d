"""Define ``Decision``: the next plan of a training run, and the line that explains in the log why it is adopted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perf_model.plan_request import SizedPlan
from perf_model.prediction.memory import Budgets
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.action import ActionKind
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import gigabytes, seconds

VISIBLE = 0.05
"""The least relative difference that the log mentions."""

_NOUNS = {
    ActionKind.PREFETCH: "copies of states to the GPU",
    ActionKind.GPU_STEP: "updates on the GPU",
    ActionKind.FLUSH_STATES: "copies of states to the host",
    ActionKind.CPU_STEP: "CPU updates",
    ActionKind.PUBLISH: "copies of parameters to the GPU",
}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The plan to adopt at the next border of a step.

    ``reason`` is the event that led to it. ``moves`` names the units that change their placement. The running plan was
    predicted to expose ``before_s`` seconds per update with the same rates, windows and budgets as ``chosen``.
    """

    chosen: SizedPlan
    reason: str
    moves: str
    before_s: float

    @property
    def after_s(self) -> float:
        """Return the predicted exposed seconds of the new plan."""
        return self.chosen.planned.exposed_s

    def __str__(self) -> str:
        return (
            f"{self.reason}: {self.moves}, predicted exposed time {seconds(self.before_s)} -> {seconds(self.after_s)}"
        )


def describe_moves(before: UpdatePlan, after: UpdatePlan) -> str:
    """Return how the units of ``after`` are placed differently, and the slots if their number changes."""
    if _borders(before) == _borders(after):
        moved = Counter(
            pair for pair in zip(before.placements, after.placements, strict=True) if pair[0] is not pair[1]
        )
        parts = [
            f"{_units(count)} from {old.value} to {new.value}" for (old, new), count in sorted(moved.items(), key=_rank)
        ]
    else:
        placed = Counter(after.placements)
        counts = (f"{placed[placement]} {placement.value}" for placement in Placement if placed[placement])
        parts = [f"{_units(len(after.placements))} instead of {len(before.placements)} ({', '.join(counts)})"]
    slots = before.schedule.num_slots, after.schedule.num_slots
    if slots[0] != slots[1]:
        parts.append(f"{slots[0]} -> {slots[1]} slots")
    return ", ".join(parts) or "another order of the same placements"


def _borders(plan: UpdatePlan) -> list[tuple[int, int, int]]:
    """Return the sub-group, the begin and the end of each unit. When forward needs a unit may become known later."""
    return [(unit.sub_group, unit.begin, unit.end) for unit in plan.workload.units]


def describe_rates(
    before: Mapping[ActionKind, float], now: Mapping[ActionKind, float], windows: tuple[Windows, Windows], since: int
) -> str:
    """Return which rates, relative to the profile's, and which windows have changed since the last adoption."""
    parts = list(_changed_rates(before, now))
    for name, old_s, new_s in (
        ("backward", windows[0].backward_s, windows[1].backward_s),
        ("forward", windows[0].forward_s, windows[1].forward_s),
    ):
        if differs(old_s, new_s):
            parts.append(f"{name} {seconds(old_s)} -> {seconds(new_s)}")
    return f"{' and '.join(parts) or 'rates as measured'} since about step {since}"


def describe_windows(windows: Windows, first_step: int, last_step: int) -> str:
    """Return the windows that were measured for the first time."""
    return (
        f"{seconds(windows.backward_s)} of backward and {seconds(windows.forward_s)} of forward measured in steps "
        f"{first_step} to {last_step}"
    )


def describe_budgets(before: Budgets, now: Budgets, step: int) -> str:
    """Return the GPU memory that a plan may take before and now."""
    old, new = (
        "unlimited" if gpu_bytes is None else gigabytes(gpu_bytes) for gpu_bytes in (before.gpu_bytes, now.gpu_bytes)
    )
    return f"GPU memory for states {old} -> {new} at step {step}"


def differs(old: float, new: float) -> bool:
    """Return whether two positive values differ by more than ``VISIBLE``."""
    return abs(new - old) > VISIBLE * max(old, new)


def _changed_rates(before: Mapping[ActionKind, float], now: Mapping[ActionKind, float]) -> Iterator[str]:
    for kind, noun in _NOUNS.items():
        if kind in now and differs(before.get(kind, 1.0), now[kind]):
            yield f"{noun} at {now[kind]:.2f} of the profile"


def _units(count: int) -> str:
    return "1 unit" if count == 1 else f"{count} units"


def _rank(item: tuple[tuple[Placement, Placement], int]) -> tuple[int, str, str]:
    """Return a key that sorts the most frequent moves first."""
    (old, new), count = item
    return -count, old.value, new.value
