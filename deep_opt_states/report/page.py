"""Render a run as one HTML page that needs no network: its scripts, with uPlot in ``vendor``, are inside the page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deep_opt_states.report.folder import RecordedRun, values_of
from deep_opt_states.report.line import WARM_UPDATES
from perf_model.prediction.draw import COLOURS, shown_ms
from perf_model.prediction.memory import MemoryKind
from perf_model.prediction.timeline import MODEL, Phase, PhaseSpan, Span, Timeline, seconds_of
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import gigabytes_per_second, params_per_second, percent, seconds, size

HERE = Path(__file__).parent

MAX_POINTS = 1000
"""The most points of a curve. In a longer run, a point is the median of several steps."""

Cell = str | tuple[float, str]
"""A cell of a table: a text, or a number with its text. The first cell of a row is its heading."""

Table = tuple[str, Sequence[str], Sequence[Sequence[Cell]]]
"""The caption, the headings and the rows of a table."""

_QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "iteration_s": ("iteration", seconds),
    "forward_s": ("forward, without waits for the update", seconds),
    "backward_s": ("backward, until the next update", seconds),
    "cost_s": ("cost of the update", seconds),
    "exposed_s": ("exposed: the model waits", seconds),
    "slowed_s": ("forward and backward take longer", seconds),
    "hidden_s": ("hidden behind backward and forward", seconds),
    "update_s": ("duration of the update", seconds),
    "cpu_adam_s": ("CPU Adam", seconds),
    "params_per_s": ("update throughput", params_per_second),
    "h2d_bytes_per_s": ("host to device", gigabytes_per_second),
    "d2h_bytes_per_s": ("device to host", gigabytes_per_second),
    "memory_bytes": ("memory in use", size),
}
_PLACEMENTS = {
    Placement.CPU: "updated on the CPU",
    Placement.STREAMED: "streamed: updated on the accelerator, through staging slots",
    Placement.RESIDENT: "resident: kept and updated on the accelerator",
}
_MEMORY = {MemoryKind.PINNED.value: "host memory", MemoryKind.ACCELERATOR.value: "accelerator memory"}

LITTLE_GAIN = 0.95
"""The ratio of the cost to the predicted one of stock above which little is gained: predictions are no better."""

_RESOURCES = {
    Lane.H2D: "The link to the accelerator",
    Lane.COMPUTE: "The accelerator",
    Lane.D2H: "The link to host memory",
    Lane.CPU: "The CPU with its memory",
    Lane.PUBLISH: "The copy of parameters to the accelerator",
    Lane.READ: "Reading the disk",
    Lane.WRITE: "Writing to the disk",
}


def render(run: RecordedRun, name: str) -> str:
    """Return the page as HTML; ``name`` is the title of the run."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # The order of the series of a chart.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"seconds": seconds, "percent": percent}
    scripts = [(HERE / name).read_text("utf-8") for name in ("vendor/uPlot.iife.min.js", "page.js")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    steps_per_point = -(-len(run.steps) // MAX_POINTS)
    return environment.get_template("page.html.jinja").render(
        name=name,
        label=label_of(run),
        verdict=verdict(run),
        run=run,
        curves=_curves(run, steps_per_point),
        steps_per_point=steps_per_point,
        timelines=[_timeline(*update) for update in (run.measured, run.predicted) if update is not None],
        tables=list(_tables(run)),
        units=_units(run.info.plan),
        scripts=scripts,
        script_hashes=" ".join(f"'sha256-{each}'" for each in hashes),
        library_style=(HERE / "vendor/uPlot.min.css").read_text("utf-8"),
    )


def _curves(run: RecordedRun, steps_per_point: int) -> dict[str, list[float | None]]:
    """Return the values of each quantity that was recorded, and of ``step``, without the first updates."""
    steps = run.steps[WARM_UPDATES:]
    groups = [steps[first : first + steps_per_point] for first in range(0, len(steps), max(1, steps_per_point))]
    found = {
        quantity: [
            float(f"{median(values):.6g}") if (values := values_of(quantity, group)) else None for group in groups
        ]
        for quantity in _QUANTITIES
    }
    curves = {quantity: values for quantity, values in found.items() if any(values)}
    return {"step": [group[-1]["step"] for group in groups], **curves} if curves else {}


def _timeline(timeline: Timeline, phases: Sequence[PhaseSpan]) -> dict[str, Any]:
    """Return the rows of a timeline: a name, the share of the update, and bars from one millisecond to another."""
    start_ms, end_ms = shown_ms(timeline, phases)

    def bar(span: PhaseSpan | Span, entry: Phase | ActionKind, label: str, name: str) -> tuple[float | str, ...]:
        limits_ms = (min(end_ms, max(start_ms, limit_s * 1e3)) for limit_s in (span.start_s, span.end_s))
        return (*limits_ms, COLOURS[entry], label, f"{name}: {seconds(span.end_s - span.start_s)}")

    of_model = [bar(span, span.phase, span.phase.value, span.phase.value) for span in phases]
    by_lane: dict[Lane, list[tuple[float | str, ...]]] = {lane: [] for lane in timeline.lanes}
    for span in timeline.spans:
        by_lane[span.action.lane].append(bar(span, span.action.kind, str(span.action.unit), span.action.name))
    shares = {lane: timeline.busy_s(lane) / max(timeline.active_s, 1e-9) for lane in by_lane}
    shown = {span.action.kind for span in timeline.spans} | {span.phase for span in phases}
    return {
        "start_ms": start_ms,
        "end_ms": end_ms,
        "active_s": timeline.active_s,
        "exposed_s": seconds_of(Phase.EXPOSED, phases) if phases else timeline.end_s,
        "rows": [(MODEL, None, of_model), *((lane.value, shares[lane], bars) for lane, bars in by_lane.items())],
        "legend": [(entry.value, colour) for entry, colour in COLOURS.items() if entry in shown],
        "trace": timeline.chrome_trace(phases),
    }


def _tables(run: RecordedRun) -> Iterator[Table]:
    plan, numel = run.info.plan, max(1, run.info.plan.workload.numel)
    typical = run.typical_steps
    if typical:
        of_all = f" of {len(run.steps)}" if len(run.steps) > len(typical) else ""
        rows: list[list[Cell]] = [
            [text, (middle, unit(middle)), "" if (last := typical[-1].get(key)) is None else (last, unit(last))]
            for key, (text, unit) in _QUANTITIES.items()
            if (middle := run.median(key)) is not None
        ]
        yield "Updates", ["", f"median of {len(typical)}{of_all} updates", "last update"], rows
    if run.compared:
        caption = f"Predicted against measured, median of {run.compared_updates} updates"
        rows = []
        for row in run.compared:
            predicted, measured = ((each, seconds(each)) for each in (row.predicted_s, row.measured_s))
            rows.append([row.name, predicted, measured, (row.error or 0.0, row.shown_error)])
        yield caption, ["", "predicted (SIMULATED)", "measured", "error"], rows
    rows = []
    for placement in Placement:
        if count := plan.placements.count(placement):
            placed = plan.numel(placement)
            share = placed / numel
            rows.append([_PLACEMENTS[placement], (count, str(count)), (placed, f"{placed:,}"), (share, percent(share))])
    yield "Plan", ["placement", "units", "parameters of rank 0", "share"], rows
    rows = [
        [_MEMORY.get(kind, kind), (reserved, size(reserved)), (reserved / numel, f"{reserved / numel:.1f} bytes")]
        for kind, reserved in run.info.memory_bytes.items()
    ]
    yield "Memory that rank 0 reserved for the update", ["", "reserved", "per parameter"], rows


def _units(plan: UpdatePlan) -> Table:
    rows: list[list[Cell]] = [
        [str(unit.index), unit.label, placement.value, (unit.numel, f"{unit.numel:,}")]
        for unit, placement in zip(plan.workload.units, plan.placements, strict=True)
    ]
    return "Every unit", ["unit", "layers", "placement", "parameters"], rows


def label_of(run: RecordedRun) -> str:
    """Return the label of all seconds of the run: "EMULATED", "SIMULATED", or "" if a real machine was measured."""
    return next((label for label in ("EMULATED", "SIMULATED") if label in run.info.accelerator), "")


def verdict(run: RecordedRun) -> str:
    """Return the verdict, which begins with the label of its seconds."""
    return " ".join(filter(None, [f"{label}:" if (label := label_of(run)) else "", *_sentences(run)]))


def _sentences(run: RecordedRun) -> Iterator[str]:
    cost_s, iteration_s = run.median("cost_s"), run.median("iteration_s")
    if cost_s is None:
        yield "No update was recorded."
        return
    if iteration_s is None:
        yield f"The update costs {seconds(cost_s)}; no iteration was recorded."
    else:
        share = percent(cost_s / iteration_s)
        yield f"The update costs {share} of an iteration: {seconds(cost_s)} of {seconds(iteration_s)}."
    if run.measured is not None:
        yield _limit(run.measured[0])
    if (stock_s := run.stock_s) is not None:
        gain = "little or nothing is gained here" if cost_s > LITTLE_GAIN * stock_s else "the plugin saves time"
        yield f"Stock's update is predicted (SIMULATED from the profile) to cost at least {seconds(stock_s)}: {gain}."
    if all(placement is Placement.CPU for placement in run.info.plan.placements):
        yield "The CPU updates every unit, as with stock."


def _limit(timeline: Timeline) -> str:
    """Return the sentence about the lane that is busy for the largest share of the update."""
    shares = {lane: timeline.busy_s(lane) / max(timeline.active_s, 1e-9) for lane in timeline.lanes}
    busiest = max(shares, key=lambda lane: shares[lane])
    if shares[busiest] < 0.5:
        return f"Nothing is busy for more than {percent(shares[busiest])} of the update: actions wait for one another."
    return f"{_RESOURCES[busiest]} limits the update, busy for {percent(shares[busiest])} of it."
