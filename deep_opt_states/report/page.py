"""Read the folder of a run, and render it as one HTML page that needs nothing else: no scripts, and no network."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deep_opt_states.report.line import INFO, MEASURED, PREDICTED, STEPS, WARM_UPDATES
from deep_opt_states.report.record import FORMAT, ComparisonRow, RunInfo
from perf_model.json_input import parse_json, read_text, shorten
from perf_model.prediction.draw import draw_svg
from perf_model.prediction.memory import MemoryKind
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range, Unit, Workload
from perf_model.units import gigabytes_per_second, params_per_second, percent, seconds, size

MAX_RUN_BYTES = 10**10
"""The most bytes of a file of a run that are read. A long training writes large files."""

Cell = str | tuple[float, str]
"""A cell of a table: a text, or a number with its text. The first cell of a row is its heading."""

Table = tuple[str, Sequence[str], Sequence[Sequence[Cell]]]
"""The caption, the headings and the rows of a table."""

_QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "exposed_s": ("exposed: the model waits", seconds),
    "hidden_s": ("hidden behind backward and forward", seconds),
    "update_s": ("duration of the update", seconds),
    "cpu_adam_s": ("CPU Adam", seconds),
    "params_per_s": ("update throughput", params_per_second),
    "h2d_bytes_per_s": ("host to device", gigabytes_per_second),
    "d2h_bytes_per_s": ("device to host", gigabytes_per_second),
}
_PLACEMENTS = {
    Placement.CPU: "updated on the CPU",
    Placement.STREAMED: "streamed: updated on the accelerator, through staging slots",
    Placement.RESIDENT: "resident: kept and updated on the accelerator",
}
_MEMORY = {MemoryKind.PINNED.value: "page-locked host memory", MemoryKind.ACCELERATOR.value: "accelerator memory"}


class RunError(ValueError):
    """An error for a folder that contains no readable run: the rule, the value found, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as its folder describes it. Predictions and measurements may be missing."""

    info: RunInfo
    steps: Sequence[Mapping[str, float | None]]
    compared_updates: int
    compared: Sequence[ComparisonRow]
    measured: tuple[Timeline, Sequence[PhaseSpan]] | None
    predicted: tuple[Timeline, Sequence[PhaseSpan]] | None

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Return the run in ``folder``, as far as it is written. Raise ``RunError`` if there is none."""

        def read(name: str) -> str:
            return read_text(folder / name, MAX_RUN_BYTES)

        try:
            info = parse_json(read(INFO))
            if info["format"] != FORMAT:
                raise ValueError(f"format {shorten(info['format'])}")
            # A killed process may have written a part of the last line.
            lines = [parse_json(line) for line in read(STEPS).splitlines() if line.endswith("}")]
            measured, predicted = (
                Timeline.from_chrome_trace(parse_json(read(name))) if (folder / name).exists() else None
                for name in (MEASURED, PREDICTED)
            )
            return cls(
                info=_info(info),
                steps=[
                    {name: value if value is None else float(value) for name, value in line.items()} for line in lines
                ],
                compared_updates=int(info.get("compared_updates", 0)),
                compared=[
                    ComparisonRow(str(row["what"]), float(row["predicted_s"]), float(row["measured_s"]))
                    for row in info.get("compared", [])
                ],
                measured=measured,
                predicted=predicted,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"A run must be a folder that training has written, of format {FORMAT}; found {folder}: "
                f"{type(error).__name__}: {error}.\n"
                f'Train with "deep_optimizer_states": {{"report": "FOLDER"}}, and name that folder.'
            ) from None


def _info(found: Mapping[str, Any]) -> RunInfo:
    plan = found["plan"]
    units = [
        Unit(index, tuple(Range(*map(int, run)) for run in ranges), str(label))
        for index, (ranges, label) in enumerate(plan["units"])
    ]
    read = UpdatePlan(
        workload=Workload(tuple(units)),
        placements=tuple(map(Placement, plan["placements"])),
        num_slots=int(plan["num_slots"]),
        order=None if plan["order"] is None else tuple(map(int, plan["order"])),
    )
    return RunInfo(
        began=str(found["began"]),
        world_size=int(found["world_size"]),
        accelerator=str(found["accelerator"]),
        software=dict(found["software"]),
        plan=read,
        memory_bytes={str(kind): int(reserved) for kind, reserved in found["memory_bytes"].items()},
    )


def render(run: RecordedRun, name: str) -> str:
    """Return the page as HTML; ``name`` is the title of the run."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        name=name, info=run.info, tables=list(_tables(run)), units=_units(run.info.plan), figures=list(_figures(run))
    )


def _tables(run: RecordedRun) -> Iterator[Table]:
    plan, numel = run.info.plan, max(1, run.info.plan.workload.numel)
    warm = run.steps[WARM_UPDATES:] or run.steps
    if run.steps:
        of_all = f" of {len(run.steps)}" if len(run.steps) > len(warm) else ""
        rows: list[list[Cell]] = [
            [label, (median(values), unit(median(values))), (values[-1], unit(values[-1]))]
            for key, (label, unit) in _QUANTITIES.items()
            if (values := [value for step in warm if (value := step.get(key)) is not None])
        ]
        yield "Updates", ["", f"median of {len(warm)}{of_all} updates", "last update"], rows
    if run.compared:
        caption = f"Predicted against measured, median of {run.compared_updates} updates"
        rows = []
        for row in run.compared:
            predicted, measured = ((each, seconds(each)) for each in (row.predicted_s, row.measured_s))
            rows.append([row.name, predicted, measured, (row.error or 0.0, row.shown_error)])
        yield caption, ["", "predicted", "measured", "error"], rows
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


def _figures(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield the caption, a data URL and the text for screen readers of each figure."""
    for caption, update in (
        ("The last update, as measured", run.measured),
        ("The update as predicted for the measured lengths of backward and forward", run.predicted),
    ):
        if update is None:
            continue
        timeline, phases = update
        exposed_s = seconds_of(Phase.EXPOSED, phases) if phases else timeline.end_s
        lanes = dict.fromkeys(span.action.lane for span in timeline.spans)
        text = (
            f"A row for each lane, a bar for each action, over time. {seconds(timeline.active_s)} of work, of which "
            f"{seconds(exposed_s)} are exposed. "
            f"Busy: {', '.join(f'{lane.value} {seconds(timeline.busy_s(lane))}' for lane in lanes)}."
        )
        encoded = base64.b64encode(draw_svg(timeline, str(run.info.plan), phases)).decode()
        yield caption, f"data:image/svg+xml;base64,{encoded}", text
