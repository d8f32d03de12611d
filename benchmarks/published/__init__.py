"""How near are predictions to the published runs of the original artifact?

The updates of the artifact are expressed as schedules of ours. The rates of a machine are fitted on a few runs, and
predict the other runs. Source: arXiv 2410.21316 and its logs, github.com/mauryaavinash95/deep-optimizer-states-results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.published.comparison import (
    LINE,
    MODEL,
    MODELS,
    NODES,
    PER_PARAMETER,
    RULES_OF_PLAN,
    STRIDES,
    RunComparison,
    compare,
    repeated_differences,
)
from benchmarks.published.runs import QUANTITIES, read_runs
from perf_model.presets.comparison import LARGER_MODELS

SHOWN_ERRORS = "the errors that plan prints are those of its rules"


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the absolute relative errors of the runs whose settings were not fitted, by split. Quick runs are whole."""
    runs = read_runs()
    for split in (STRIDES, MODELS, NODES):
        yield from _rows_of(split.name, compare(runs, split))
    yield from _errors("measured: repeated settings, from their median", "update", repeated_differences(runs))


def rounded(errors: Sequence[float]) -> tuple[int, float, float]:
    """Return the number of errors, and their median and 90th percentile to a tenth of a percent."""
    return len(errors), round(float(np.median(errors)), 3), round(float(np.percentile(errors, 90)), 3)


def _rows_of(split: str, found: RunComparison) -> Iterator[Row]:
    for quantity in QUANTITIES:
        yield from _errors(f"{split}: {MODEL}", quantity, found.errors_of(quantity))
        for other in (LINE, PER_PARAMETER, RULES_OF_PLAN):
            yield from _errors(f"{split}: {other}", quantity, found.errors_of(quantity, other, where=other))
            yield from _errors(f"{split}: {MODEL} instead of {other}", quantity, found.errors_of(quantity, where=other))
        by_machine: dict[str, list[float]] = defaultdict(list)
        for prediction in found.not_fitted:
            run = prediction.run
            if quantity not in prediction.seconds[MODEL]:
                continue
            key = f"{split}: {run.machine}, {run.model_name}, nodes: {run.nodes}"
            by_machine[key].append(abs(prediction.error(quantity)))
        for key, errors in sorted(by_machine.items()):
            yield from _errors(key, quantity, errors)
    yield from _errors("measured: predicted strides, from a line through all", "update", found.around_line)
    if split == MODELS.name:
        shown = rounded(found.errors_of("iteration", RULES_OF_PLAN, where=RULES_OF_PLAN))
        yield Row(
            variant=f"{split}: {RULES_OF_PLAN}", quantity=SHOWN_ERRORS, value=shown == LARGER_MODELS, claimed=True
        )


def _errors(variant: str, quantity: str, errors: Sequence[float]) -> Iterator[Row]:
    if errors:
        samples = np.abs(errors).tolist()
        p90 = float(np.percentile(samples, 90))
        yield Row(variant=variant, quantity=f"{quantity}, error", unit="share", samples=samples)
        yield Row(variant=variant, quantity=f"{quantity}, error, 90th percentile", unit="share", samples=[p90])
