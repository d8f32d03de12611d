"""A ``Run`` as one HTML page that needs nothing else: no scripts, and nothing from the net."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deep_opt_states.report.comparison import Compared
from deep_opt_states.report.reporter import WARM_UPDATES
from deep_opt_states.report.run_data import Pictured, Run
from perf_model.prediction.draw import draw_svg
from perf_model.prediction.memory import Where
from perf_model.prediction.timeline import Phase, seconds_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import gigabytes_a_second, params_a_second, percent, seconds, size


@dataclass(frozen=True)
class Number:
    """``value`` as the run has it, ``text`` for people."""

    value: float
    text: str


Cell: TypeAlias = "Number | str"
"""The first of a row is its heading."""


@dataclass(frozen=True)
class Table:
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Picture:
    """``address`` has the whole picture in it; ``text`` is for whoever cannot see it."""

    caption: str
    address: str
    text: str


Unit: TypeAlias = Callable[[float], str]

_QUANTITIES: dict[str, tuple[str, Unit]] = {
    "exposed_s": ("exposed: the model waits", seconds),
    "hidden_s": ("hidden beside backward and forward", seconds),
    "update_s": ("from the decision to the end", seconds),
    "cpu_adam_s": ("CPU Adam", seconds),
    "params_per_s": ("update throughput", params_a_second),
    "h2d_bytes_per_s": ("host to device", gigabytes_a_second),
    "d2h_bytes_per_s": ("device to host", gigabytes_a_second),
}


def render(run: Run, name: str) -> str:
    """``name`` is what the page calls the run."""
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
        about=run.about,
        tables=list(_tables(run)),
        pictures=list(_pictures(run)),
        sub_groups=_sub_groups(run.about.plan),
    )


def _tables(run: Run) -> Iterable[Table]:
    warm = run.steps[WARM_UPDATES:] or run.steps
    if run.steps:
        of = f"{len(warm)} of {len(run.steps)} updates" if len(run.steps) > len(warm) else f"{len(warm)} updates"
        rows: list[list[Cell]] = [
            [label, Number(median(values), unit(median(values))), Number(values[-1], unit(values[-1]))]
            for key, (label, unit) in _QUANTITIES.items()
            if (values := [value for step in warm if (value := step.get(key)) is not None])
        ]
        yield Table("Updates", ["", f"median of {of}", "the last"], rows)
    if run.compared:
        caption = f"Predicted against measured, median of {run.compared_updates} updates"
        yield Table(caption, ["", "predicted", "measured", "error"], list(map(_compared, run.compared)))
    yield Table("Plan", ["updated", "sub-groups", "parameters of rank 0", "share"], list(_placed(run.about.plan)))
    numel = max(1, run.about.plan.workload.numel)
    memory: list[list[Cell]] = [
        [_MEMORY.get(where, where), Number(taken, size(taken)), Number(taken / numel, f"{taken / numel:.1f} bytes")]
        for where, taken in run.about.memory_bytes.items()
    ]
    yield Table("Memory that rank 0 has reserved for the update", ["", "taken", "a parameter"], memory)


def _compared(row: Compared) -> list[Cell]:
    return [
        row.what,
        Number(row.predicted_s, seconds(row.predicted_s)),
        Number(row.measured_s, seconds(row.measured_s)),
        Number(row.error, f"{row.error:+.0%}"),
    ]


_WHERE = {
    Placement.CPU: "on the CPU",
    Placement.STREAMED: "on the accelerator, streamed through slots",
    Placement.RESIDENT: "on the accelerator, resident",
}


_MEMORY = {Where.PINNED.value: "page-locked host memory", Where.ACCELERATOR.value: "accelerator memory"}


def _placed(plan: UpdatePlan) -> Iterable[list[Cell]]:
    for placement in Placement:
        if count := plan.placements.count(placement):
            numel = plan.numel(placement)
            share = numel / max(1, plan.workload.numel)
            yield [
                _WHERE[placement],
                Number(count, str(count)),
                Number(numel, f"{numel:,}"),
                Number(share, percent(share)),
            ]


def _sub_groups(plan: UpdatePlan) -> Table:
    rows: list[list[Cell]] = [
        [str(sub_group.index), placement.value, Number(sub_group.numel, f"{sub_group.numel:,}")]
        for sub_group, placement in zip(plan.workload.sub_groups, plan.placements, strict=True)
    ]
    return Table("Every sub-group", ["sub-group", "placement", "parameters"], rows)


def _pictures(run: Run) -> Iterable[Picture]:
    picture = partial(_picture, str(run.about.plan))
    if run.measured is not None:
        yield picture("The last update, as measured", run.measured)
    if run.predicted is not None:
        yield picture(
            "The update as predicted, beside a backward and a forward as long as were measured", run.predicted
        )


def _picture(plan: str, caption: str, pictured: Pictured) -> Picture:
    timeline, phases = pictured
    exposed_s = seconds_of(Phase.EXPOSED, phases) if phases else timeline.end_s
    busy = ", ".join(f"{lane} {busy}" for lane, busy in _busy(pictured))
    text = (
        f"A row for each lane, a bar for each action, over time. {seconds(timeline.active_s)} of work, of which "
        f"{seconds(exposed_s)} are exposed. Busy: {busy}."
    )
    encoded = base64.b64encode(draw_svg(timeline, plan, phases)).decode()
    return Picture(caption, f"data:image/svg+xml;base64,{encoded}", text)


def _busy(pictured: Pictured) -> Iterable[tuple[str, str]]:
    timeline, _ = pictured
    for lane in dict.fromkeys(span.action.lane for span in timeline.spans):
        yield lane.value, seconds(timeline.busy_s(lane))
