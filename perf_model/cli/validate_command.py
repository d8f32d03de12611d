"""Fit rates on a few measured runs, predict the other runs, and print predictions and errors."""

from __future__ import annotations

import argparse
import json

from perf_model.published.runs import read_runs
from perf_model.published.validate import LINE_STRIDES, ErrorSummary, Prediction, RunGroup, Validation, validate
from perf_model.units import GB, billions

RATES = {
    "dram_bytes_per_s": "host memory",
    "pageable_bytes_per_s": "publishing",
    "link_bytes_per_s": "link",
    "gpu_adam_params_per_s": "GPU",
}
"""The titles of the rates on the screen."""


def run(options: argparse.Namespace) -> int:
    """Print the validation, and return the exit code. Raise ``RunsError`` if the file cannot be used."""
    found = validate(read_runs(options.runs), options.across_models)
    if options.json:
        print(json.dumps(found.to_json_dict(), indent=2))
    else:
        _print(found)
    return 0


def _print(found: Validation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for group in found.groups:
        console.print(_heading(group), highlight=False, markup=False, soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for header in ("model", "offloaded", "sub-groups of", "stride", "measured s", "predicted s", "error", ""):
            table.add_column(header, justify="left" if header in ("model", "") else "right", overflow="fold")
        for position in group.positions:
            # Text, because the name of a model may contain square brackets, which are markup in a str.
            table.add_row(*map(Text, _cells(found.predictions[position])))
        console.print(table)
        console.print()
    for line in _summary(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(group: RunGroup) -> str:
    fit = group.fit
    rates = (f"{text} {_rate(fit.rates.__dict__[name], name)}" for name, text in RATES.items() if name in fit.names)
    typical = [text for name, text in RATES.items() if name not in fit.names]
    rest = f"; typical values are assumed for: {', '.join(typical)}" if typical else ""
    where = f"{group.name}, tp {group.tp}, dp {group.dp}"
    return f"{where}\nfitted on {fit.settings} different settings: {', '.join(rates)}{rest}"


def _rate(value: float, name: str) -> str:
    return f"{value / GB:.3g} GB/s" if "bytes" in name else f"{billions(value)} parameters/s"


def _cells(prediction: Prediction) -> list[str]:
    setting = prediction.run.setting
    return [
        prediction.run.model_name,
        f"{setting.cpu_ratio:.0%}",
        f"{setting.sub_group_size / 1e6:,.0f} M",
        "-" if setting.update_stride is None else str(setting.update_stride),
        f"{prediction.run.measured_s:#.3g}",
        f"{prediction.predicted_s:#.3g}",
        f"{prediction.error:+.1%}",
        "fitted" if prediction.fitted else "",
    ]


def _summary(found: Validation) -> list[str]:
    if found.errors is None:
        return ["Nothing was predicted: every run was fitted, so there is no error to report."]
    lines = [_errors("Absolute relative error of the predicted runs", found.errors)]
    if found.compared_with_line is None:
        needed = f"a sweep of one model with {LINE_STRIDES} strides or more"
        return [*lines, f"The baseline, a line in 1/stride, needs {needed}; there is none."]
    ours, line = found.compared_with_line
    where = f"In sweeps with {LINE_STRIDES} strides or more"
    return [*lines, _errors(where, ours), _errors("  the baseline there, a line in 1/stride", line)]


def _errors(title: str, errors: ErrorSummary) -> str:
    return f"{title} ({errors.runs}): median {errors.median:.1%}, 90th percentile {errors.p90:.1%}"
