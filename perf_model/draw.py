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
    ActionKind.PUBLISH: "#8fc1f0",
}


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Write the picture to ``path`` (its suffix chooses the format)."""
    # Matplotlib costs a second to import; planning must not pay for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = list(Lane)
    figure = Figure(figsize=(12, 1.2 + 0.6 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    to_ms = 1e3
    shortest_labelled_s = timeline.makespan_s / 40
    for span in timeline.spans:
        row = lanes.index(span.action.lane)
        duration_s = span.end_s - span.start_s
        axes.barh(
            row,
            duration_s * to_ms,
            left=span.start_s * to_ms,
            height=0.7,
            color=_COLOURS[span.action.kind],
            edgecolor="white",
            linewidth=0.5,
        )
        if duration_s >= shortest_labelled_s:
            middle_s = (span.start_s + span.end_s) / 2
            axes.text(middle_s * to_ms, row, str(span.action.sub_group), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, max(timeline.makespan_s * to_ms, 1e-6))
    axes.set_xlabel("milliseconds since the start of the update")
    axes.set_title(title, fontsize=10)
    present = {span.action.kind for span in timeline.spans}
    patches = [Patch(color=colour, label=kind.value) for kind, colour in _COLOURS.items() if kind in present]
    if patches:
        axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=len(patches), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
