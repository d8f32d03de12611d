"""Draw a ``Timeline``: one row per lane, one bar per action, and the phases of the model above them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from perf_model.prediction.timeline import MODEL, Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import ActionKind, Lane
from perf_model.units import seconds

COLOURS: dict[Phase | ActionKind, str] = {
    Phase.BACKWARD: "#b9c4d0",
    Phase.FORWARD: "#b7d8b0",
    Phase.EXPOSED: "#d9534f",
    ActionKind.PREFETCH: "#4c9be8",
    ActionKind.GPU_STEP: "#5bb974",
    ActionKind.GPU_SPECULATE: "#a9dbb7",
    ActionKind.FLUSH_STATES: "#e8804c",
    ActionKind.CPU_STEP: "#a78bda",
    ActionKind.SPECULATE: "#cdbdf0",
    ActionKind.COMMIT: "#6b4fa0",
    ActionKind.PUBLISH: "#e6b422",
    ActionKind.ADOPT: "#b8901b",
    ActionKind.READ: "#5fb3b3",
    ActionKind.WRITE: "#b35f7a",
}

STOCK = "stock's model"
"""The row of stock's phases."""

_CONTEXT_SHARE = 0.08

_WIDTH_INCHES, _TITLE_CHARACTERS, _LABEL_POINTS = 13, 180, 8


def draw(
    timeline: Timeline, path: Path, title: str, phases: Sequence[PhaseSpan] = (), of_stock: Sequence[PhaseSpan] = ()
) -> None:
    """Write the picture to ``path``, whose suffix is the format, and create its folder.

    With ``of_stock``, the phases of stock's model are the first row, on the same time axis.
    """
    # Importing matplotlib takes a second, which planning must not take.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    model_rows = [name for name, spans in ((STOCK, of_stock), (MODEL, phases)) if spans]
    rows: list[str | Lane] = [*model_rows, *timeline.lanes]
    figure = Figure(figsize=(_WIDTH_INCHES, 1.8 + 0.7 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    start_ms, end_ms = shown_ms(timeline, phases)
    end_ms = max([end_ms, *(span.end_s * 1e3 for span in of_stock)])
    ms_per_point = (end_ms - start_ms) / (0.9 * _WIDTH_INCHES * 72)

    def bar(row: int, left_ms: float, right_ms: float, colour: str, label: str) -> None:
        width_points = (right_ms - left_ms) / ms_per_point
        edge = 0.5 if width_points > 3 else 0.0
        # If bars were snapped to whole pixels, those thinner than a pixel would disappear.
        axes.barh(row, right_ms - left_ms, 0.6, left_ms, color=colour, edgecolor="white", linewidth=edge, snap=edge > 0)
        if len(label) * 0.7 * _LABEL_POINTS <= width_points:
            axes.text((left_ms + right_ms) / 2, row, label, ha="center", va="center", fontsize=_LABEL_POINTS)

    for name, phase_span in [*((MODEL, span) for span in phases), *((STOCK, span) for span in of_stock)]:
        left_ms, right_ms = max(start_ms, phase_span.start_s * 1e3), min(end_ms, phase_span.end_s * 1e3)
        label, colour = phase_span.phase.value, COLOURS[phase_span.phase]
        if name == MODEL and not of_stock:
            axes.axvspan(left_ms, right_ms, color=colour, alpha=0.2, linewidth=0, zorder=0)
        bar(rows.index(name), left_ms, right_ms, colour, f"{label} {seconds(phase_span.end_s - phase_span.start_s)}")
    for span in timeline.spans:
        row, colour = rows.index(span.action.lane), COLOURS[span.action.kind]
        bar(row, span.start_s * 1e3, span.end_s * 1e3, colour, str(span.action.unit))
    busy = [f"{lane.value}\n{timeline.busy_s(lane) / max(timeline.active_s, 1e-9):.0%} busy" for lane in timeline.lanes]
    axes.set_yticks(range(len(rows)), [*model_rows, *busy])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(start_ms, end_ms)
    if start_ms < 0:
        axes.axvline(0, color="#555555", linewidth=1)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("milliseconds since the update was decided")
    heading = f"update of {timeline.active_s * 1e3:.1f} ms"
    if phases:
        exposed_s = seconds_of(Phase.EXPOSED, phases)
        heading += f": {exposed_s * 1e3:.1f} ms exposed, {timeline.hidden_s(exposed_s) * 1e3:.1f} ms hidden"
    axes.set_title(f"{heading}\n{textwrap.fill(title, _TITLE_CHARACTERS)}", fontsize=9)
    shown = {span.action.kind for span in timeline.spans} | {span.phase for span in (*phases, *of_stock)}
    patches = [Patch(color=colour, label=entry.value) for entry, colour in COLOURS.items() if entry in shown]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def shown_ms(timeline: Timeline, phases: Sequence[PhaseSpan]) -> tuple[float, float]:
    """Return the first and the last millisecond of the picture: the update, with a little of the phases around it."""
    start_s, end_s = min((span.start_s for span in timeline.spans), default=0.0), timeline.end_s
    context_s = _CONTEXT_SHARE * (end_s - start_s)
    if phases:
        start_s = min(start_s, max(start_s - context_s, phases[0].start_s))
        end_s = max(end_s, min(end_s + context_s, phases[-1].end_s))
    shown_ms = max((end_s - start_s) * 1e3, 1e-6)
    return start_s * 1e3, start_s * 1e3 + 1.01 * shown_ms
