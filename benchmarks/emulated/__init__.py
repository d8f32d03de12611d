"""How long do stock and ours take on EMULATED machines and disks, and are the predictions near?

Everything is EMULATED: no row is a measurement of a GPU or a disk. A small model trains for real on the software GPU of
the tests (``tests/software_gpu``), and its losses and weights are compared bit by bit. Its copies, its kernels and its
updates take the time that they would take on the emulated machine, whose rates come from a preset of ``perf_model``.
The predictions come from the same rates. So this shows whether the runtime works as the model predicts, and not
whether a preset describes a real machine: ``run.py`` explains the scales.

The parts:

- ``run``: which machine and training run is emulated, and which small model stands for it?
- ``host_passes``: how do updates on the CPU take emulated time?
- ``arms``: which placements are compared?
- ``turns``: how are the arms interleaved, and how are they measured?
- ``disk``, ``throttled_disk``: how long does an update with states on an EMULATED disk take?
- ``demonstration``: which run does ``make demo`` train?
- ``prediction``: how long does an arm take as ``perf_model`` predicts?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any

from benchmarks.emulated import disk
from benchmarks.emulated.arms import PLANNED, arms_of
from benchmarks.emulated.prediction import PredictedArm, is_negligible, predict, windows_of
from benchmarks.emulated.run import LAG, EmulatedRun, SmallModel, start_device
from benchmarks.emulated.turns import Arm, Turns, train_in_turns
from benchmarks.harness.rows import BIT_IDENTICAL, COST, COST_SHARE, EMULATED, ERROR, ITERATION_SPEEDUP, Row
from benchmarks.harness.variants import NO_OVERLAP
from perf_model.prediction.simulate import NO_WINDOWS

SHARE_ON_ONE_GPU = 0.4
"""The share of GPU memory for a planned update if one GPU has the whole model: a tenth could not hold its gradients."""

RUNS = tuple(
    replace(node, model=model, micro_batch=micro_batch, small=SmallModel(layers=layers))
    for node in (
        EmulatedRun(machine="a100-pcie4", ranks=4),
        EmulatedRun(machine="h100-pcie5", ranks=4),
        EmulatedRun(machine="gh200", ranks=1, gpu_memory_share=SHARE_ON_ONE_GPU),
    )
    for model, micro_batch, layers in (("7B", 1, 4), ("13B", 2, 5))
)

LONG_WINDOWS = EmulatedRun(machine="h100-pcie5", ranks=4, micro_batch=8)
"""The run with forward and backward so long that nearly the whole update can overlap with them."""

BF16_STATES = EmulatedRun(machine="h100-pcie5", ranks=4, states="bf16")
"""The run of which stock and the plugin both keep masters and moments in bf16."""

NEARLY_EQUAL = 0.02
"""Arms whose predicted iterations differ by less than this share have no predicted order."""

ITERATION, UPDATE, EXPOSED = f"{EMULATED} iteration", f"{EMULATED} update", f"{EMULATED} exposed"
ORDER = f"pairs of {EMULATED} arms in the predicted order"


def measure(*, quick: bool, machines: float = 1, disks: float = 1) -> Iterator[Row]:
    """Yield the seconds of each arm in each run with their errors, and also of states on disk.

    ``machines`` or ``disks`` of 0 leaves these rows out.
    """
    start_device()
    if machines:
        turns = Turns(turns=1, iterations=2) if quick else Turns(turns=2, iterations=2)
        for run in RUNS[:1] if quick else (*RUNS, LONG_WINDOWS, BF16_STATES):
            yield from measure_run(run, turns)
    if disks:
        yield from disk.measure(quick=quick)


def measure_run(run: EmulatedRun, turns: Turns) -> Iterator[Row]:
    """Yield the rows of the arms of one run."""
    with run.planned_by_plugin() as passes:
        arms = train_in_turns(run, arms_of(run), passes, turns)
    predictions = [_predicted(run, arm) for arm in arms]
    for arm, predicted in zip(arms, predictions, strict=True):
        labels: dict[str, Any] = {"variant": arm.variant.name, "setting": run.labels}
        yield from _rows(arm, arms[0], predicted, **labels)
    yield _order_row(arms, predictions, variant="all arms", setting=run.labels)


def _predicted(run: EmulatedRun, arm: Arm) -> PredictedArm:
    windows = windows_of(run) if _overlaps(arm) else NO_WINDOWS
    return predict(run, arm.numels, arm.plan, windows)


def _overlaps(arm: Arm) -> bool:
    return arm.variant.block is not None and not NO_OVERLAP.items() <= arm.variant.block.items()


def _rows(arm: Arm, stock: Arm, predicted: PredictedArm, **labels: Any) -> Iterator[Row]:
    # Stock's step is its update, all of which is exposed.
    exposed_s = [update.exposed_s for update in arm.updates] or arm.step_s
    update_s = [update.update_s for update in arm.updates] or arm.step_s
    yield from _compared(ITERATION, predicted.iteration_s, arm.iteration_s, **labels)
    if arm.variant.measures_cost:
        yield Row(quantity=f"{ITERATION} without updates", unit="s", samples=arm.without_updates_s, **labels)
        yield Row(quantity=f"{EMULATED} {COST}", unit="s", samples=arm.costs_s, **labels)
        shares = [cost_s / stock_s for cost_s, stock_s in zip(arm.costs_s, stock.costs_s, strict=True)]
        yield Row(quantity=f"{EMULATED} {COST_SHARE}", unit="share", samples=shares, **labels)
    if is_negligible(predicted.exposed_s, exposed_s, stock.step_s):
        yield Row(quantity=EXPOSED, unit="s", samples=exposed_s, **labels)
    else:
        yield from _compared(EXPOSED, predicted.exposed_s, exposed_s, **labels)
    yield from _compared(UPDATE, predicted.update_s, update_s, **labels)
    if arm is not stock:
        speedups = [stock_s / ours_s for stock_s, ours_s in zip(stock.iteration_s, arm.iteration_s, strict=True)]
        yield Row(quantity=f"{EMULATED} {ITERATION_SPEEDUP}", unit="times", samples=speedups, **labels)
    yield Row(quantity=LAG, unit="s", samples=arm.lag_s, **labels)
    same = (arm.losses, arm.digest) == (stock.losses, stock.digest)
    yield Row(quantity=f"{BIT_IDENTICAL} ({EMULATED})", value=same, claimed=True, **labels)
    if arm.variant.name == PLANNED:
        yield Row(quantity=f"plan ({EMULATED})", value=str(arm.plan), **labels)


def _compared(quantity: str, predicted_s: float, measured_s: Sequence[float], **labels: Any) -> Iterator[Row]:
    yield Row(quantity=quantity, unit="s", samples=measured_s, **labels)
    errors = [predicted_s / sample_s - 1 for sample_s in measured_s]
    yield Row(quantity=f"{quantity}, {ERROR}", unit="share", samples=errors, **labels)


def _order_row(arms: Sequence[Arm], predictions: Sequence[PredictedArm], **labels: Any) -> Row:
    """Return the share of pairs of arms whose iterations are in the predicted order."""
    right = []
    for (arm, predicted), (other, other_predicted) in combinations(zip(arms, predictions, strict=True), 2):
        ratio = predicted.iteration_s / other_predicted.iteration_s
        if max(ratio, 1 / ratio) > 1 + NEARLY_EQUAL:
            right.append((ratio > 1) == (median(arm.iteration_s) > median(other.iteration_s)))
    return Row(quantity=ORDER, unit="share", samples=[sum(right) / len(right)], **labels)
