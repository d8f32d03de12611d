"""A ``Timeline`` as a picture: one row a lane, one bar an action."""

from __future__ import annotations

import textwrap
from pathlib import Path

from perf_model.action import Action, ActionKind, Lane
from perf_model.timeline import Timeline

_COLOURS = {
    ActionKind.PREFETCH: "#4c9be8",
    ActionKind.GPU_STEP: "#5bb974",
    ActionKind.FLUSH_STATES: "#e8804c",
    ActionKind.CPU_STEP: "#a78bda",
    ActionKind.PUBLISH: "#e6b422",
}

_WIDTH_INCHES, _POINTS_PER_INCH = 13, 72
_TITLE_CHARACTERS = 180
_LABEL_POINTS = 8
_CHARACTER_POINTS = 0.7 * _LABEL_POINTS
"""A little more than a digit is wide."""


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Write the picture to ``path`` (its suffix chooses the format).

    A bar is labelled with its sub-group and, in brackets, its slot, as far as it has room for them.
    """
    # Matplotlib costs a second to import; planning must not pay for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = list(Lane)
    figure = Figure(figsize=(_WIDTH_INCHES, 1.8 + 0.7 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    start_ms = min((span.start_s for span in timeline.spans), default=0.0) * 1e3
    shown_ms = max(timeline.end_s * 1e3 - start_ms, 1e-6)
    active_s = timeline.active_s
    ms_per_point = shown_ms / (0.9 * _WIDTH_INCHES * _POINTS_PER_INCH)
    for span in timeline.spans:
        row = lanes.index(span.action.lane)
        left_ms, width_ms = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
        width_points = width_ms / ms_per_point
        # Edges of bars that are hardly wider would be all that is seen of them.
        edge = 0.5 if width_points > 3 else 0.0
        colour = _COLOURS[span.action.kind]
        # Snapped to whole pixels, bars thinner than one would be lost.
        axes.barh(row, width_ms, 0.6, left_ms, color=colour, edgecolor="white", linewidth=edge, snap=edge > 0)
        if label := _label(span.action, width_points):
            axes.text(left_ms + width_ms / 2, row, label, ha="center", va="center", fontsize=_LABEL_POINTS)
    busy = [timeline.busy_s(lane) / active_s if active_s > 0 else 0.0 for lane in lanes]
    axes.set_yticks(
        range(len(lanes)), [f"{lane.value}\n{share:.0%} busy" for lane, share in zip(lanes, busy, strict=True)]
    )
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(start_ms, start_ms + 1.01 * shown_ms)
    if start_ms < 0:
        axes.axvline(0, color="#555555", linewidth=1)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("milliseconds since the update was decided")
    wrapped = textwrap.fill(title, _TITLE_CHARACTERS)
    axes.set_title(f"update of {active_s * 1e3:.1f} ms\n{wrapped}", fontsize=9)
    present = {span.action.kind for span in timeline.spans}
    patches = [Patch(color=colour, label=kind.value) for kind, colour in _COLOURS.items() if kind in present]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _label(action: Action, width_points: float) -> str:
    """The longest that fits."""
    alone = str(action.sub_group)
    labels = [alone] if action.slot is None else [f"{alone} [{action.slot}]", alone]
    return next((label for label in labels if len(label) * _CHARACTER_POINTS <= width_points), "")
