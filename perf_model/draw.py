"""A ``Timeline`` as a picture: one row a lane, one bar an action."""

from __future__ import annotations

from pathlib import Path

from perf_model.action import ActionKind, Lane
from perf_model.timeline import Timeline

_COLOURS = {
    ActionKind.PREFETCH: "#4c9be8",
    ActionKind.GPU_STEP: "#5bb974",
    ActionKind.FLUSH_STATES: "#e8804c",
    ActionKind.CPU_STEP: "#a78bda",
    ActionKind.PUBLISH: "#e6b422",
}


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Write the picture to ``path`` (its suffix chooses the format).

    A bar is labelled with its sub-group and, in brackets, its slot; one too short for that has its label above.
    """
    # Matplotlib costs a second to import; planning must not pay for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = list(Lane)
    figure = Figure(figsize=(13, 1.6 + 0.7 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    makespan_ms = max(timeline.makespan_s * 1e3, 1e-6)
    for span in timeline.spans:
        row = lanes.index(span.action.lane)
        start_ms, duration_ms = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
        colour = _COLOURS[span.action.kind]
        axes.barh(row, duration_ms, left=start_ms, height=0.6, color=colour, edgecolor="white", linewidth=0.5)
        fits = duration_ms >= makespan_ms / 30
        slot = "" if span.action.slot is None or not fits else f" [{span.action.slot}]"
        middle_ms, height = start_ms + duration_ms / 2, row if fits else row - 0.41
        axes.text(middle_ms, height, f"{span.action.sub_group}{slot}", ha="center", va="center", fontsize=8)
    busy = [f"{lane.value}\n{timeline.busy_s(lane) * 1e3 / makespan_ms:.0%} busy" for lane in lanes]
    axes.set_yticks(range(len(lanes)), busy)
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_xlim(0, makespan_ms * 1.01)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("milliseconds since the start of the update")
    axes.set_title(f"update of {makespan_ms:.1f} ms\n{title}", fontsize=9)
    present = {span.action.kind for span in timeline.spans}
    patches = [Patch(color=colour, label=kind.value) for kind, colour in _COLOURS.items() if kind in present]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
