"""``simulate``: the timeline of the plan, as a grid, a trace and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from perf_model.cli.inputs import add_arguments, read_inputs
from perf_model.schedule.action import Lane
from perf_model.schedule.schedule import grid
from perf_model.training_run.model import ModelError
from perf_model.units import seconds


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "show the predicted timeline of the plan"
    parser = commands.add_parser("simulate", help=about, description=about.capitalize() + ".")
    add_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("simulation"), help="a folder for timeline.json and .png")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    found = read_inputs(options, options.world_size, options.micro_batch).forecast()
    plan, timeline = found.planned.plan, found.planned.timeline
    phases = found.windows.phases(timeline, plan.workload)
    trace, picture = options.output / "timeline.json", options.output / "timeline.png"
    try:
        timeline.write_chrome_trace(trace, phases)
    except OSError as error:
        rule = f"--output: must be a folder that can be written, found {options.output}: {error.strerror}."
        raise ModelError(f"{rule}\nName another.") from None
    from perf_model.prediction.draw import draw

    draw(timeline, picture, str(plan), phases)
    its = found.predicted
    update_s, exposed_s, hidden_s = map(seconds, (its.update_s, its.exposed_update_s, its.hidden_update_s))
    print(f"{plan}\n{grid(plan.schedule)}\n")
    print(f"update {update_s}: {exposed_s} exposed, {hidden_s} hidden")
    for lane in Lane:
        print(f"{lane.value:8} busy {seconds(timeline.busy_s(lane))} of {update_s}")
    print(f"\n{trace} (open it at https://ui.perfetto.dev)\n{picture}")
    return 0
