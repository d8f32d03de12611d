"""How does the plugin compare with all other ways to train a model of 1.7 or 4 billion parameters on one GPU?

A random Qwen3 with Hugging Face's shapes trains with 16,384 and 8,192 tokens per step in bf16, with recomputation and
clipping. Each arm is a process of its own with a time limit, and its rows are written when it ends. In the same
process, stock, no offload, Twin-Flow and ours also train without updates, as the base for the cost of the update.
``gpu_bits.py`` compares bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.arms import MODELS, timed_jobs
from benchmarks.gpu.processes import ArmOutcome, compile_kernels, run_jobs
from benchmarks.harness.rows import BIT_IDENTICAL, COST, COST_SHARE, RETAINED, Row, Waived
from benchmarks.harness.setting import trains_on_gpu
from benchmarks.harness.variants import NO_OFFLOAD, STOCK

TOKENS = {"tiny": (64, 32), "Qwen3-1.7B": (16_384, 8_192), "Qwen3-4B": (8_192, 2_048)}
"""Tokens per step by model: the larger number first, so that a plan never meets a larger need of memory."""

Record = Mapping[str, Any]


def measure(*, quick: bool, billions: float = 1.7, minutes: float = 8.6) -> Iterator[Row]:
    """Yield the rows of each arm when it ends, within so many minutes. Raise ``Waived`` if there is no GPU."""
    ends_s = time.monotonic() + 60 * minutes
    model = chosen_model(billions, quick=quick)
    yield from rows_of(run_jobs(timed_jobs(model, TOKENS[model]), ends_s))


def chosen_model(billions: float, *, quick: bool) -> str:
    """Return the name of the model, and compile all kernels unless ``quick``.

    Raise ``Waived`` if there is no GPU, and ``ValueError`` for a size that is not listed.
    """
    if quick:
        return "tiny"
    if not trains_on_gpu():
        raise Waived("no GPU: a model of billions of parameters does not train on the CPU")
    name = f"Qwen3-{billions:g}B"
    if name not in MODELS:
        raise ValueError(f"billions must be 1.7 or 4, found {billions}. Write for example --set billions=4.")
    compile_kernels()
    return name


def rows_of(outcomes: Iterator[ArmOutcome]) -> Iterator[Row]:
    """Print a line for each outcome, and yield its rows.

    Of the outcomes that compare bits, stock's must come directly before ours.
    """
    measured: dict[tuple[str, int], Record] = {}
    stocks_records: Sequence[Sequence[Record]] = ()
    for outcome in outcomes:
        print(outcome, flush=True)
        job, labels = outcome.job, outcome.job.labels(outcome.job.tokens[0])
        if outcome.waived:
            yield Row(quantity="iteration", waived=outcome.waived, **labels)
            continue
        if outcome.error:
            yield Row(quantity="completed", value=False, claimed=True, **labels)
            yield Row(quantity="error", value=outcome.error, **labels)
        if job.deterministic:
            if job.arm == STOCK.name:
                stocks_records = outcome.records
            elif not outcome.error and all(stocks_records):
                same = _bits(outcome.records) == _bits(stocks_records)
                yield Row(quantity=BIT_IDENTICAL, value=same, claimed=True, **labels)
            continue
        # A job writes the record again when it has also trained without updates.
        for tokens, record in {record["tokens"]: record for record in outcome.records[0]}.items():
            measured[job.arm, tokens] = record
            bases = (measured.get((arm, tokens)) for arm in (STOCK.name, NO_OFFLOAD.name))
            yield from _timed_rows(record, *bases, **job.labels(tokens))


def _bits(records: Sequence[Sequence[Record]]) -> list[tuple[Any, Any]]:
    """Return the losses and the hash of the states of each rank."""
    return [(record["losses"], record["digest"]) for of_rank in records for record in of_rank]


def _timed_rows(record: Record, stock: Record | None, no_offload: Record | None, **labels: Any) -> Iterator[Row]:
    """Yield the rows of one arm and number of tokens."""
    yield Row(quantity="iteration", unit="s", samples=record["iteration_s"], **labels)
    yield Row(quantity="mean of all iterations", unit="s", samples=[record["mean_s"]], **labels)
    rate = record["tokens"] / record["mean_s"]
    yield Row(quantity="throughput", unit="tokens/s", samples=[rate], **labels)
    if no_offload is None:
        yield Row(quantity=RETAINED, waived="no offload has no result", **labels)
    else:
        yield Row(quantity=RETAINED, unit="share", samples=[no_offload["mean_s"] / record["mean_s"]], **labels)
    if "without_updates_s" in record:
        without_s = record["without_updates_s"]
        yield Row(quantity="iteration without updates", unit="s", samples=without_s, **labels)
        yield Row(quantity=COST, unit="s", samples=[_cost_s(record)], **labels)
        if stock is not None and "without_updates_s" in stock:
            yield Row(quantity=COST_SHARE, unit="share", samples=[_cost_s(record) / _cost_s(stock)], **labels)
    for name, samples in zip(("forward", "backward", "step()"), record["phases_s"], strict=True):
        yield Row(quantity=f"{name} on the host", unit="s", samples=samples, **labels)
    if trains_on_gpu():
        yield Row(quantity="peak GPU memory", unit="bytes", samples=[record["gpu_peak_bytes"]], **labels)
    yield Row(quantity="peak host memory", unit="bytes", samples=[record["host_peak_bytes"]], **labels)
    if "joules" in record:
        yield Row(quantity="energy of an iteration", unit="J", samples=[record["joules"]], **labels)
    yield Row(quantity="losses", value=" ".join(f"{loss:.6f}" for loss in record["losses"]), **labels)
    yield Row(quantity="configuration", value=record["configuration"], **labels)


def _cost_s(record: Record) -> float:
    """Return by how many seconds the update prolongs the median iteration."""
    return float(median(record["iteration_s"]) - median(record["without_updates_s"]))
