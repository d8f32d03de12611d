"""How long do stock and ours take on EMULATED machines, and what does the performance model predict?

Everything is EMULATED: no row is a measurement of a GPU. A small model trains for real on the software GPU of the tests
(``tests/software_gpu``), and its losses and weights are compared bit by bit. Its copies, its kernels and its updates
take the time that they would take on the emulated machine, whose rates are those of a preset of ``perf_model``. The
predictions come from the same rates. So this shows whether the runtime does what the model predicts, and not whether a
preset describes a real machine: ``run.py`` explains the scales.

The parts:

- ``run``: which machine and training run is emulated, and which small model stands for it?
- ``host_passes``: how do updates on the CPU take emulated time?
- ``arms``: which placements are compared?
- ``turns``: how are the arms trained in turns, and what is measured?
- ``scaled_run``: how is a machine scaled so that the plugin itself plans and adapts?
- ``demonstration``: what does ``make demo`` train?
- ``small_copies``: how long does a small copy wait beside the copies of an update?
- ``prediction``: what does ``perf_model`` predict for an arm?
- ``chart``: how are predicted and measured seconds drawn?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any

import deepspeed

from benchmarks.emulated.arms import FEW_ARMS, arms_of
from benchmarks.emulated.chart import PredictedAndMeasured
from benchmarks.emulated.prediction import PredictedArm, is_negligible, predict, windows_of
from benchmarks.emulated.run import EmulatedRun, SmallModel, load_average
from benchmarks.emulated.scaled_run import ScaledRun
from benchmarks.emulated.small_copies import small_copy_rows
from benchmarks.emulated.turns import Arm, Turns, train_in_turns
from benchmarks.harness.rows import Row
from benchmarks.harness.targets import (
    EMULATED_BIT_IDENTICAL,
    EMULATED_COST,
    EMULATED_COST_SHARE,
    EMULATED_SPEEDUP,
)
from benchmarks.harness.variants import NO_OVERLAP
from perf_model.prediction.simulate import NO_WINDOWS
from tests.software_gpu import device
from tests.software_gpu.process_group import BACKEND, register_backend

SHARE_ON_ONE_GPU = 0.4
"""The share of GPU memory for a planned update if one GPU has the whole model: a tenth could not hold its gradients."""

RUNS = tuple(
    replace(node, model=model, micro_batch=micro_batch, small=SmallModel(layers=layers))
    for node in (
        ScaledRun(machine="a100-pcie4", ranks=4),
        ScaledRun(machine="h100-pcie5", ranks=4),
        ScaledRun(machine="gh200", ranks=1, gpu_memory_share=SHARE_ON_ONE_GPU),
    )
    for model, micro_batch, layers in (("7B", 1, 4), ("13B", 2, 5))
)

LONG_WINDOWS = ScaledRun(machine="h100-pcie5", ranks=4, micro_batch=8)
"""The run with forward and backward so long that nearly the whole update can overlap with them."""

BF16_STATES = ScaledRun(machine="h100-pcie5", ranks=4, states="bf16")
"""The run of which stock and the plugin both keep masters and moments in bf16."""

NEARLY_EQUAL = 0.02
"""Arms whose predicted iterations differ by less than this share have no predicted order."""

ITERATION = "EMULATED iteration"
WITHOUT_UPDATES = f"{ITERATION} without updates"
EXPOSED = "EMULATED exposed"
PREDICTED_ITERATION, PREDICTED_EXPOSED = f"{ITERATION}, predicted", f"{EXPOSED}, predicted"

IDLE = "EMULATED idle time of the computing stream"
IDLE_OTHERWISE = f"{IDLE} outside the exposed update"
HOST_STEP = "EMULATED host time in step()"
HOST_STEP_WITHOUT_ADAM = f"{HOST_STEP} outside Adam"
HOST_STEP_RATIO = f"{HOST_STEP} / stock's outside Adam"

CHART = PredictedAndMeasured(
    (PREDICTED_ITERATION, ITERATION), (PREDICTED_EXPOSED, EXPOSED), titles=("machine", "model", "micro_batch")
)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield predicted and measured seconds of each arm in each run, and those of small copies beside the lanes."""
    start_device()
    turns = Turns(turns=1, iterations=2) if quick else Turns(turns=2, iterations=2)
    for run in RUNS[:1] if quick else RUNS:
        yield from measure_run(run, turns, only=FEW_ARMS if quick else None)
        with run.emulated():
            yield from small_copy_rows(run, quick=quick)
    if not quick:
        # Without small copies, which depend neither on the micro-batch nor on the states.
        for run in (LONG_WINDOWS, BF16_STATES):
            yield from measure_run(run, turns, only=FEW_ARMS)


def start_device() -> None:
    """Load the software GPU and start the collectives of this rank. Call this once per process."""
    device.register()
    register_backend()
    deepspeed.init_distributed(dist_backend=BACKEND)


def measure_run(run: ScaledRun, turns: Turns, *, only: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of the arms of one run, or of those that are named in ``only``, which begin with stock."""
    with run.planned_by_plugin() as passes:
        load = load_average()
        variants = [arm for arm in arms_of(run) if only is None or arm.name in only]
        arms = train_in_turns(run, variants, passes, turns)
    predictions = [_predicted(run, arm) for arm in arms]
    for arm, predicted in zip(arms, predictions, strict=True):
        labels: dict[str, Any] = {"variant": arm.variant.name, "setting": run.labels}
        yield from _rows(arm, arms[0], predicted, **labels)
    labels = {"variant": "all arms", "setting": run.labels}
    yield _order_row(arms, predictions, **labels)
    loads = [load, load_average()]
    yield Row(quantity="load of this machine during the EMULATED run", unit="threads", samples=loads, **labels)


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
        yield Row(quantity=WITHOUT_UPDATES, unit="s", samples=arm.without_updates_s, **labels)
        yield Row(quantity=EMULATED_COST, unit="s", samples=arm.costs_s, **labels)
        shares = [cost_s / stock_s for cost_s, stock_s in zip(arm.costs_s, stock.costs_s, strict=True)]
        yield Row(quantity=EMULATED_COST_SHARE, unit="share", samples=shares, **labels)
    yield from _with_prediction(EXPOSED, predicted.exposed_s, exposed_s, **labels)
    if not is_negligible(predicted.exposed_s, exposed_s, stock.step_s):
        yield _error_row(f"{EXPOSED}, prediction error", predicted.exposed_s, exposed_s, **labels)
    yield Row(quantity=IDLE, unit="s", samples=arm.idle_s, **labels)
    otherwise_s = [idle - exposed for idle, exposed in zip(arm.idle_s, exposed_s, strict=True)]
    yield Row(quantity=IDLE_OTHERWISE, unit="s", samples=otherwise_s, **labels)
    yield Row(quantity=f"{IDLE_OTHERWISE}, predicted", unit="s", samples=[predicted.gradients_s], **labels)
    yield Row(quantity=HOST_STEP, unit="s", samples=arm.host_step_s, **labels)
    without_adam_s = [step - adam for step, adam in zip(stock.host_step_s, stock.adam_s, strict=True)]
    if arm is stock:
        yield Row(quantity=HOST_STEP_WITHOUT_ADAM, unit="s", samples=without_adam_s, **labels)
    else:
        ratios = [step / without for step, without in zip(arm.host_step_s, without_adam_s, strict=True)]
        yield Row(quantity=HOST_STEP_RATIO, unit="times", samples=ratios, **labels)
        speedups = [stock_s / ours_s for stock_s, ours_s in zip(stock.iteration_s, arm.iteration_s, strict=True)]
        yield Row(quantity=EMULATED_SPEEDUP, unit="times", samples=speedups, **labels)
        shares = [exposed / stock_s for stock_s, exposed in zip(stock.step_s, exposed_s, strict=True)]
        yield Row(quantity=f"{EXPOSED} / stock's update", unit="share", samples=shares, **labels)
    yield from _compared("EMULATED update", predicted.update_s, update_s, **labels)
    cpu_s = "CPU time of this machine per EMULATED iteration"
    yield Row(quantity=cpu_s, unit="s", samples=arm.cpu_s, **labels)
    lag_s = "longest lag of this machine in an EMULATED iteration"
    yield Row(quantity=lag_s, unit="s", samples=arm.lag_s, **labels)
    same = (arm.losses, arm.digest) == (stock.losses, stock.digest)
    yield Row(quantity=EMULATED_BIT_IDENTICAL, value=same, claimed=True, **labels)
    yield Row(quantity="configuration (EMULATED)", value=arm.configuration, **labels)
    if arm.plan is not None:
        source = " (planned from the rates of the preset)" if arm.variant.name.startswith("planned") else ""
        yield Row(quantity="plan (EMULATED)", value=f"{arm.plan}{source}", **labels)


def _compared(quantity: str, predicted_s: float, measured_s: Sequence[float], **labels: Any) -> Iterator[Row]:
    yield from _with_prediction(quantity, predicted_s, measured_s, **labels)
    yield _error_row(f"{quantity}, prediction error", predicted_s, measured_s, **labels)


def _with_prediction(quantity: str, predicted_s: float, measured_s: Sequence[float], **labels: Any) -> Iterator[Row]:
    yield Row(quantity=quantity, unit="s", samples=measured_s, **labels)
    yield Row(quantity=f"{quantity}, predicted", unit="s", samples=[predicted_s], **labels)


def _error_row(quantity: str, predicted_s: float, measured_s: Sequence[float], **labels: Any) -> Row:
    errors = [predicted_s / sample_s - 1 for sample_s in measured_s]
    return Row(quantity=quantity, unit="share", samples=errors, **labels)


def _order_row(arms: Sequence[Arm], predictions: Sequence[PredictedArm], **labels: Any) -> Row:
    """Return the share of pairs of arms whose iterations are in the predicted order."""
    right = []
    for (arm, predicted), (other, other_predicted) in combinations(zip(arms, predictions, strict=True), 2):
        ratio = predicted.iteration_s / other_predicted.iteration_s
        if max(ratio, 1 / ratio) > 1 + NEARLY_EQUAL:
            right.append((ratio > 1) == (median(arm.iteration_s) > median(other.iteration_s)))
    share = sum(right) / len(right)
    return Row(quantity="pairs of EMULATED arms in the predicted order", unit="share", samples=[share], **labels)
