"""Render a ``RecordedRun`` as one HTML page that needs nothing else: no scripts, and no network."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deep_opt_states.report.comparison import ComparisonRow
from deep_opt_states.report.reporter import WARM_UPDATES
from deep_opt_states.report.run_data import RecordedRun, TimelineAndPhases
from perf_model.prediction.draw import draw_svg
from perf_model.prediction.memory import MemoryKind
from perf_model.prediction.timeline import Phase, seconds_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import gigabytes_per_second, params_per_second, percent, seconds, size


@dataclass(frozen=True)
class Number:
    """A number with the value of the run, and with a text for readers."""

    value: float
    text: str


Cell: TypeAlias = "Number | str"
"""A cell of a table; the first cell of a row is its heading."""


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Figure:
    """A figure of the page. ``address`` is a data URL of the whole image; ``text`` describes it for screen readers."""

    caption: str
    address: str
    text: str


Unit: TypeAlias = Callable[[float], str]

_QUANTITIES: dict[str, tuple[str, Unit]] = {
    "exposed_s": ("exposed: the model waits", seconds),
    "hidden_s": ("hidden behind backward and forward", seconds),
    "update_s": ("duration of the update", seconds),
    "cpu_adam_s": ("CPU Adam", seconds),
    "params_per_s": ("update throughput", params_per_second),
    "h2d_bytes_per_s": ("host to device", gigabytes_per_second),
    "d2h_bytes_per_s": ("device to host", gigabytes_per_second),
}


def render(run: RecordedRun, name: str) -> str:
    """Return the page as HTML; ``name`` is the title of the run."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["number"] = lambda cell: isinstance(cell, Number)
    return environment.get_template("page.html.jinja").render(
        name=name,
        info=run.info,
        tables=list(_tables(run)),
        figures=list(_figures(run)),
        units=_units(run.info.plan),
    )


def _tables(run: RecordedRun) -> Iterable[Table]:
    warm = run.steps[WARM_UPDATES:] or run.steps
    if run.steps:
        count = f"{len(warm)} of {len(run.steps)} updates" if len(run.steps) > len(warm) else f"{len(warm)} updates"
        rows: list[list[Cell]] = [
            [label, Number(median(values), unit(median(values))), Number(values[-1], unit(values[-1]))]
            for key, (label, unit) in _QUANTITIES.items()
            if (values := [value for step in warm if (value := step.get(key)) is not None])
        ]
        yield Table("Updates", ["", f"median of {count}", "last update"], rows)
    if run.compared:
        caption = f"Predicted against measured, median of {run.compared_updates} updates"
        yield Table(caption, ["", "predicted", "measured", "error"], list(map(_compared, run.compared)))
    headings = ["placement", "units", "parameters of rank 0", "share"]
    yield Table("Plan", headings, list(_placements(run.info.plan)))
    numel = max(1, run.info.plan.workload.numel)
    memory: list[list[Cell]] = [
        [
            _MEMORY.get(kind, kind),
            Number(reserved, size(reserved)),
            Number(reserved / numel, f"{reserved / numel:.1f} bytes"),
        ]
        for kind, reserved in run.info.memory_bytes.items()
    ]
    yield Table("Memory that rank 0 reserved for the update", ["", "reserved", "per parameter"], memory)


def _compared(row: ComparisonRow) -> list[Cell]:
    return [
        row.name,
        Number(row.predicted_s, seconds(row.predicted_s)),
        Number(row.measured_s, seconds(row.measured_s)),
        Number(row.error, f"{row.error:+.0%}"),
    ]


_PLACEMENTS = {
    Placement.CPU: "updated on the CPU",
    Placement.STREAMED: "streamed: updated on the accelerator, through staging slots",
    Placement.RESIDENT: "resident: kept and updated on the accelerator",
}


_MEMORY = {MemoryKind.PINNED.value: "page-locked host memory", MemoryKind.ACCELERATOR.value: "accelerator memory"}


def _placements(plan: UpdatePlan) -> Iterable[list[Cell]]:
    for placement in Placement:
        if count := plan.placements.count(placement):
            numel = plan.numel(placement)
            share = numel / max(1, plan.workload.numel)
            yield [
                _PLACEMENTS[placement],
                Number(count, str(count)),
                Number(numel, f"{numel:,}"),
                Number(share, percent(share)),
            ]


def _units(plan: UpdatePlan) -> Table:
    rows: list[list[Cell]] = [
        [str(unit.index), unit.label, placement.value, Number(unit.numel, f"{unit.numel:,}")]
        for unit, placement in zip(plan.workload.units, plan.placements, strict=True)
    ]
    return Table("Every unit", ["unit", "layers", "placement", "parameters"], rows)


def _figures(run: RecordedRun) -> Iterable[Figure]:
    figure = partial(_figure, str(run.info.plan))
    if run.measured is not None:
        yield figure("The last update, as measured", run.measured)
    if run.predicted is not None:
        yield figure("The update as predicted for the measured lengths of backward and forward", run.predicted)


def _figure(plan: str, caption: str, update: TimelineAndPhases) -> Figure:
    timeline, phases = update
    exposed_s = seconds_of(Phase.EXPOSED, phases) if phases else timeline.end_s
    busy = ", ".join(f"{lane} {busy}" for lane, busy in _busy(update))
    text = (
        f"A row for each lane, a bar for each action, over time. {seconds(timeline.active_s)} of work, of which "
        f"{seconds(exposed_s)} are exposed. Busy: {busy}."
    )
    encoded = base64.b64encode(draw_svg(timeline, plan, phases)).decode()
    return Figure(caption, f"data:image/svg+xml;base64,{encoded}", text)


def _busy(update: TimelineAndPhases) -> Iterable[tuple[str, str]]:
    timeline, _ = update
    for lane in dict.fromkeys(span.action.lane for span in timeline.spans):
        yield lane.value, seconds(timeline.busy_s(lane))
