"""Train beside tensor parallelism on the device, and print the differences from stock on the CPU accelerator.

The argument is the name of a selection: ``CHOICE``, or an adversary. The device executes the collectives of the ranks
that share a model on streams, too.

Stock trains on the CPU accelerator first. DeepSpeed makes AutoTP's ``DeviceMesh`` then, and keeps its groups: PyTorch
makes none for the device, because the name of the device type is not of letters only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from deep_opt_states.config import Config
from deep_opt_states.zero.start import planning
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS
from deep_opt_states.zero.step.measured_windows import MeasuredWindows
from perf_model.prediction.overlap_windows import Windows
from tests.launch import answer
from tests.model.profiles import RATES, profile
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.software_gpu.training.parity_on_device_ranks import CHUNK_BYTES, MACHINE
from tests.zero.parity.case_runs import results_in_turn
from tests.zero.parity.training import Record, differences
from tests.zero.tensor_parallel.cases import ARMS, BY_NAME, CASES, TensorParallelCase, block_of, run
from tests.zero.tensor_parallel.layouts import SharedModel, layouts

CHOICE = "choice"
"""The selection of ``make test``: three cases in bf16 and in fp16."""

EVERY_CASE = ("plain", "lazy")
"""The adversaries under which every case trains with stock and with every placement."""

STOCK = "stock"

_CHOSEN = {
    ("mpu", "fp16", "plain"): (BY_NAME,),
    ("mpu", "bf16", "clipping"): ("planned",),
    ("AutoTP", "bf16", "clipping"): ("planned", BY_NAME),
}


STEPS = FIRST_STEPS + 3
"""The steps of each run. After the first of them, the plugin plans with the windows and the memory that it measured."""

SLOW_CPU = {**RATES, "cpu_adam_params_per_s": 1e7, "cpu_adam_beside_transfers_params_per_s": 1e7}
"""The rates of a machine on which the planner prefers the device even for the small models of these tests."""


MEASURED = MeasuredWindows.windows


def selected(selection: str) -> Iterator[tuple[TensorParallelCase, str, tuple[str, ...]]]:
    """Yield the cases of the selection, each with its adversary and the names of its arms."""
    for case in CASES:
        if selection in EVERY_CASE:
            yield case, selection, (STOCK, *ARMS)
        elif (case.layout, case.dtype, case.setting) in _CHOSEN:
            yield case, "lazy", _CHOSEN[case.layout, case.dtype, case.setting]


def short_windows(measured: MeasuredWindows) -> Windows | None:
    """Return windows that hide nothing. On a busy machine, the measured ones could hide all updates of the CPU."""
    windows = MEASURED(measured)
    return None if windows is None else Windows(backward_s=1e-5, forward_s=1e-5)


def train_on_device(case: TensorParallelCase, layout: SharedModel, adversary: str, arm: str) -> Record:
    """Train the case on the device. The quick profile has given rates, as in ``parity_on_device_ranks``."""
    settings = ADVERSARIES[adversary]
    block = None if arm == STOCK else block_of(arm, layout)
    plans = block is not None and Config(**block).may_plan
    with (
        plugged(replace(settings, rates=MACHINE)) if plans else plugged(settings, chunk_bytes=CHUNK_BYTES),
        mock.patch.object(planning, "quick_profile", return_value=profile(SLOW_CPU)),
        mock.patch.object(MeasuredWindows, "windows", short_windows),
    ):
        return run(case, layout, block, STEPS)


def compare(case: TensorParallelCase, layout: SharedModel, adversary: str, arms: tuple[str, ...]) -> dict[str, Any]:
    """Train the case with stock on the CPU accelerator, then the arms on the device, and return the differences."""
    expected = run(case, layout, None, STEPS)
    found = {}
    for arm in arms:
        record = train_on_device(case, layout, adversary, arm)
        found[arm] = {
            "class": record.optimizer_class,
            "deferred": record.deferred,
            "placements": sorted(record.placements),
            "differences": differences(expected, record),
        }
    return {"arms": found, "numbers": expected.numbers}


def main(selection: str) -> None:
    by_name = layouts()
    work = (
        (case.name, partial(compare, case, by_name[case.layout], adversary, arms))
        for case, adversary, arms in selected(selection)
    )
    for name, result in results_in_turn(work):
        answer({"name": name, **result})


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1])
