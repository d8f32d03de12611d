"""``validate``: predictions beside measured runs, fitted on a few of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from perf_model.published.runs import read_runs
from perf_model.published.validate import LINE_STRIDES, Errors, Group, Prediction, Validation, validate
from perf_model.units import GB, billions

RATES = {
    "dram_bytes_per_s": "host memory",
    "pageable_bytes_per_s": "publishing",
    "link_bytes_per_s": "link",
    "gpu_adam_params_per_s": "GPU",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "fit rates on a few measured runs, predict the others and compare"
    parser = commands.add_parser("validate", help=about, description=about.capitalize() + ".")
    about = "measured runs, with the columns of benchmarks/data/published_runs.csv"
    parser.add_argument("--runs", type=Path, required=True, metavar="CSV", help=about)
    about = "fit a machine's smaller models and predict its larger ones; by default strides are predicted, in a sweep"
    parser.add_argument("--across-models", action="store_true", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Raises ``RunsError``."""
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
            # Text, since a model's name may have square brackets, which are markup in a str.
            table.add_row(*map(Text, _cells(found.predictions[position])))
        console.print(table)
        console.print()
    for line in _summary(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(group: Group) -> str:
    fit = group.fit
    rates = (f"{text} {_rate(fit.rates.__dict__[name], name)}" for name, text in RATES.items() if name in fit.names)
    assumed = [text for name, text in RATES.items() if name not in fit.names]
    rest = f"; as is typical: {', '.join(assumed)}" if assumed else ""
    where = f"{group.name}, tp {group.tp}, dp {group.dp}"
    return f"{where}\nfitted on {fit.settings} different settings: {', '.join(rates)}{rest}"


def _rate(value: float, name: str) -> str:
    return f"{value / GB:.3g} GB/s" if "bytes" in name else f"{billions(value)} parameters/s"


def _cells(each: Prediction) -> list[str]:
    setting = each.run.setting
    return [
        each.run.model_name,
        f"{setting.cpu_ratio:.0%}",
        f"{setting.sub_group_size / 1e6:,.0f} M",
        "-" if setting.update_stride is None else str(setting.update_stride),
        f"{each.run.measured_s:#.3g}",
        f"{each.predicted_s:#.3g}",
        f"{each.error:+.1%}",
        "fitted" if each.fitted else "",
    ]


def _summary(found: Validation) -> list[str]:
    if found.errors is None:
        return ["Nothing was predicted: every run was fitted, so there is no error to tell."]
    lines = [_errors("Absolute relative error of the predicted runs", found.errors)]
    if found.beside_line is None:
        where = f"a sweep of one model with {LINE_STRIDES} strides or more"
        return [*lines, f"A line in 1/stride, the baseline, needs {where}: not here."]
    ours, line = found.beside_line
    where = f"Where a sweep has {LINE_STRIDES} strides or more"
    return [*lines, _errors(where, ours), _errors("  a line in 1/stride, the baseline, there", line)]


def _errors(what: str, errors: Errors) -> str:
    return f"{what} ({errors.runs}): median {errors.median:.1%}, 90th percentile {errors.p90:.1%}"
