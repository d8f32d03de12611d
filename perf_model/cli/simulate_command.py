"""Show the timeline of the plan as a grid, a Chrome trace and a picture."""

from __future__ import annotations

import argparse
from dataclasses import replace

from perf_model.cli.inputs import read_inputs
from perf_model.json_input import printable, reason
from perf_model.schedule.action import Lane
from perf_model.schedule.schedule import format_grid
from perf_model.training_run.model import ModelError
from perf_model.units import DIGITS, seconds


def run(options: argparse.Namespace) -> int:
    """Write trace and picture, print the grid, and return the exit code. Raise ``ModelError`` if writing fails."""
    [inputs] = read_inputs(options, (options.world_size, options.micro_batch))
    found = inputs.forecast()
    from perf_model.prediction.draw import draw

    plan, timeline, predicted = found.planned.plan, found.planned.timeline, found.predicted
    phases = replace(found.windows, first_use=found.first_use).phases(timeline, plan.workload, found.cost)
    trace, picture = options.output / "timeline.json", options.output / "timeline.png"
    try:
        timeline.write_chrome_trace(trace, phases)
        draw(timeline, picture, str(plan), phases)
    except (OSError, ValueError) as error:
        rule = f"--output: must be a folder that can be written, found {printable(options.output)}: {reason(error)}."
        raise ModelError(f"{rule}\nName another folder.") from None
    durations_s = (predicted.update_s, predicted.exposed_update_s, predicted.hidden_update_s)
    update, exposed, hidden = (seconds(duration_s, DIGITS) for duration_s in durations_s)
    print(f"{plan}\n{format_grid(plan.schedule)}\n\nupdate {update}: {exposed} exposed, {hidden} hidden")
    for lane in Lane:
        print(f"{lane.value:8} busy {seconds(timeline.busy_s(lane), DIGITS)} of {update}")
    print(f"\n{printable(trace)} (open it at https://ui.perfetto.dev)\n{printable(picture)}")
    return 0
