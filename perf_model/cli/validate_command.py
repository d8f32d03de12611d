"""Fit rates on a few measured settings, predict the other settings, and print predictions and errors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping

from perf_model.published.baselines import LINE_STRIDES
from perf_model.published.errors import QUANTITIES, ErrorSummary
from perf_model.published.measurement_spread import MeasurementSpread
from perf_model.published.predicted_run import BASELINES, PredictedRuns, Prediction
from perf_model.published.runs import read_runs
from perf_model.published.splits import MODELS, NODES, STRIDES
from perf_model.published.update_rates import ASSUMED_MACHINE, link_bytes_per_s, preset_of
from perf_model.published.validate import RunGroup, Validation, validate
from perf_model.units import DIGITS, GB, seconds, significant

RATES = {
    "dram_bytes_per_s": "host memory",
    "pageable_bytes_per_s": "publishing",
    "streamed_bytes_per_param": "host memory per streamed parameter",
    "gpu_adam_params_per_s": "GPU Adam",
    "training_flops_per_s": "operations in training",
    "layer_s": "launches per layer",
    "interleaved_layer_s": "launches per layer after an interleaved update",
    "inter_node_bytes_per_s": "network per rank",
    "blocking_gradient_bytes_per_s": "blocking gradients",
    "gradient_bytes_per_s": "gradients",
    "rest_s": "rest of an iteration",
    "interleaved_rest_s": "rest if interleaved",
}
"""The titles of the rates on the screen."""

WIDTH = 180
"""The columns of the tables, also on a narrower terminal."""

TITLES = {
    "line_s": "where a baseline applies, a line in 1/stride",
    "per_parameter_s": "where a baseline applies, seconds per parameter",
    "planned_s": "by the rules of plan, at the same rates",
}
"""The titles on the screen of what the predictions are compared with."""

BASELINE_HEADERS = ("line", "per param.")
"""The headers of the baselines, beside each error."""


def run(options: argparse.Namespace) -> int:
    """Print the validation, and return the exit code. Raise ``RunsError`` if the file cannot be used."""
    split = MODELS if options.across_models else NODES if options.across_nodes else STRIDES
    found = validate(read_runs(options.runs), split)
    if options.json:
        print(json.dumps(found.to_json_dict(), indent=2))
    else:
        _print(found)
    return 0


def _print(found: Validation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=max(Console().width, WIDTH))

    def show(headers: tuple[str, ...], rows: Iterable[list[str]], left: int) -> None:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for index, header in enumerate(headers):
            table.add_column(header, justify="left" if index < left else "right", overflow="fold")
        for cells in rows:
            # Text, because the name of a model may contain square brackets, which are markup in a str.
            table.add_row(*map(Text, cells))
        console.print(table)
        console.print()

    with_baselines = tuple(header for quantity in QUANTITIES for header in (quantity, *BASELINE_HEADERS))
    headers = ("model", "", "offloaded", "sub-group", "stride", "measured s", "predicted s", *with_baselines)
    for group in found.groups:
        console.print(_heading(group), highlight=False, markup=False, soft_wrap=True)
        show(headers, (_cells(found.predictions[position]) for position in group.positions), 2)
    by_machine = found.by_machine()
    if by_machine:
        rows = ([*map(str, key), *_medians(runs)] for key, runs in by_machine.items())
        show(("not fitted: machine", "model", "nodes", "runs", *with_baselines), rows, 2)
    for line in (found.rule, *_summary(found)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(group: RunGroup) -> str:
    fits = [fit for fit in (group.updates, group.phases) if fit is not None]
    known = [f"{RATES[name]} {_rate(fit.values[name], name)}" for fit in fits for name in fit.determined]
    assumed = [RATES[name] for fit in fits for name in fit.values if name not in fit.determined]
    key = group.key
    ranks = f"{key.ranks_on_node} ranks per node" if key.dp is None else f"dp {key.dp}"
    return (
        f"{key.sweep or key.machine}, tp {key.tp}, {ranks}\n"
        f"{_assumed_preset(key.machine)}"
        f"fitted on {_settings(group.settings)}: {', '.join(known) or 'nothing'}\n"
        f"not determined, near typical values: {', '.join(assumed) or 'nothing'}; "
        f"held: link {link_bytes_per_s(key.machine) / GB:.0f} GB/s"
    )


def _assumed_preset(machine: str) -> str:
    """Return a line that names the assumed preset, or nothing if a preset has the GPU of ``machine``."""
    if preset_of(machine) is not None:
        return ""
    return f"no preset for {machine}; {ASSUMED_MACHINE.name} is assumed\n"


def _settings(count: int) -> str:
    return "1 setting, which determines" if count == 1 else f"{count} different settings, which determine"


def _rate(value: float, name: str) -> str:
    if name == "streamed_bytes_per_param":
        return f"{value:.0f} B"
    if name.endswith("_s") and "_per_s" not in name:
        return seconds(value, DIGITS)
    for part, unit, title in (("flops", 1e12, "TFLOPS"), ("bytes", GB, "GB/s")):
        if part in name:
            return f"{significant(value / unit, DIGITS)} {title}"
    return f"{significant(value / 1e9, DIGITS)} B parameters/s"


def _cells(prediction: Prediction) -> list[str]:
    """Return the cells of one run; the errors of the baselines are beside those of the prediction."""
    setting = prediction.run.setting
    errors = [prediction.errors(), *(prediction.other_errors(name) for name in BASELINES)]
    return [
        prediction.run.model_name,
        "fitted" if prediction.fitted else "",
        f"{setting.cpu_ratio:.0%}",
        f"{setting.sub_group_size / 1e6:,.0f} M",
        "-" if setting.update_stride is None else str(setting.update_stride),
        f"{prediction.run.measured_s:#.3g}",
        f"{prediction.predicted_s:#.3g}",
        *(_percent(found, quantity) for quantity in QUANTITIES for found in errors),
    ]


def _percent(errors: Mapping[str, float], quantity: str) -> str:
    return f"{errors[quantity]:+.1%}" if quantity in errors else ""


def _medians(runs: PredictedRuns) -> Iterator[str]:
    """Yield the number of runs, and the median absolute errors of each quantity and its baselines."""
    yield str(len(runs.predictions))
    for quantity in QUANTITIES:
        compared = (runs.compared_with(name, quantity) for name in BASELINES)
        for summary in (runs.errors_of(quantity), *(None if found is None else found[1] for found in compared)):
            yield "" if summary is None else f"{summary.median:.1%}"


def _summary(found: Validation) -> list[str]:
    predicted = found.not_fitted
    if not predicted.predictions:
        return ["Nothing was predicted: every setting was fitted, so there is no error to report."]
    lines = ["Absolute relative errors of the runs whose setting was not fitted:"]
    for name in QUANTITIES:
        summary = predicted.errors_of(name)
        if summary is None:
            continue
        lines.append(_errors(f"  {name}", summary))
        for field, title in TITLES.items():
            compared = predicted.compared_with(field, name)
            if compared is not None:
                model, other = compared
                lines.append(_errors(f"    {title}", other))
                lines.append(_errors("      the model there", model))
    if predicted.compared_with("line_s") is None:
        lines.append(f"  A line in 1/stride needs a sweep of one model with {LINE_STRIDES} strides.")
    return lines + list(_spread(found.spread))


def _spread(spread: MeasurementSpread) -> Iterator[str]:
    """Yield lines on the spread of the measured updates, which limits every model."""
    if spread.repeated is not None or spread.around_line is not None:
        yield "Spread of the measured updates, which no model predicts:"
    if spread.repeated is not None:
        yield _errors("  interleaved runs around the median of their setting, measured again", spread.repeated)
    if spread.around_line is not None:
        title = "  predicted strides around a line in 1/stride that is fitted to them, too"
        yield _errors(title, spread.around_line)


def _errors(title: str, errors: ErrorSummary) -> str:
    return f"{title} ({errors.runs}): median {errors.median:.1%}, 90th percentile {errors.p90:.1%}"
