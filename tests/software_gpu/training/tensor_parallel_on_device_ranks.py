"""Train beside tensor parallelism on the device, and print the differences from stock on the CPU accelerator.

The argument is the name of a selection: ``CHOICE``, or an adversary. The device executes the collectives of the ranks
that share a model on streams, too. Cases in bf16 have arms with split masters, which the CPU accelerator refuses.

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
from perf_model.replanning.measurements import FIRST_STEPS
from tests.launch import answer
from tests.model.profiles import RATES, profile
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.software_gpu.training.parity_on_device_ranks import CHUNK_BYTES, MACHINE
from tests.zero.parity.case import SPLIT_MASTERS, STRIDE_2
from tests.zero.parity.case_runs import results_in_turn
from tests.zero.parity.split_numels import ACCELERATOR, CPU, counted_splits
from tests.zero.parity.training import Record, differences
from tests.zero.tensor_parallel.cases import ARMS, BY_NAME, CASES, TensorParallelCase
from tests.zero.tensor_parallel.layouts import SharedModel, layouts
from tests.zero.tensor_parallel.tensor_parallel_ranks import block_of, run

CHOICE = "choice"
"""The selection of ``make test``: three cases in bf16 and in fp16, one of them with whole and with split masters."""

EVERY_CASE = ("plain", "lazy")
"""The adversaries under which every case trains with stock and with every placement."""

STOCK = "stock"

SPLIT = ", split masters"
"""The end of the name of an arm with split masters."""

SPLIT_ON = {
    f"cpu{SPLIT}": [CPU],
    f"streamed{SPLIT}": [ACCELERATOR],
    f"planned{SPLIT}": [ACCELERATOR, CPU],
    f"{BY_NAME}{SPLIT}": [ACCELERATOR, CPU],
    f"stride 2{SPLIT}": [ACCELERATOR, CPU],
}
"""The arms with split masters, and the processors that update split masters. Rules by name place resident states."""

_CHOSEN = {
    ("mpu", "fp16", "plain"): (BY_NAME,),
    ("mpu", "bf16", "clipping"): ("planned",),
    ("AutoTP", "bf16", "clipping"): ("planned", f"{BY_NAME}{SPLIT}"),
}


STEPS = FIRST_STEPS + 3
"""The steps of each run. After the first of them, the plugin plans with the windows and the memory that it measured."""

SLOW_CPU = {**RATES, "cpu_adam_params_per_s": 1e7, "cpu_adam_beside_transfers_params_per_s": 1e7}
"""The rates of a machine on which the planner prefers the device even for the small models of these tests."""


def selected(selection: str) -> Iterator[tuple[TensorParallelCase, str, tuple[str, ...]]]:
    """Yield the cases of the selection, each with its adversary and the names of its arms."""
    for case in CASES:
        if selection in EVERY_CASE:
            yield case, selection, (STOCK, *ARMS, *(SPLIT_ON if case.dtype == "bf16" else ()))
        elif (case.layout, case.dtype, case.setting) in _CHOSEN:
            yield case, "lazy", _CHOSEN[case.layout, case.dtype, case.setting]


def block_on_device(arm: str, layout: SharedModel) -> dict[str, Any]:
    """Return the plugin's block for an arm other than ``STOCK``."""
    name = arm.removesuffix(SPLIT)
    block = STRIDE_2 if name == "stride 2" else block_of(name, layout)
    return {**block, **SPLIT_MASTERS} if arm.endswith(SPLIT) else block


def train_on_device(case: TensorParallelCase, layout: SharedModel, adversary: str, arm: str) -> Record:
    """Train the case on the device. The quick profile has given rates, as in ``parity_on_device_ranks``."""
    settings = ADVERSARIES[adversary]
    block = None if arm == STOCK else block_on_device(arm, layout)
    plans = block is not None and Config(**block).may_plan
    with (
        plugged(replace(settings, rates=MACHINE)) if plans else plugged(settings, chunk_bytes=CHUNK_BYTES),
        mock.patch.object(planning, "quick_profile", return_value=profile(SLOW_CPU)),
    ):
        return run(case, layout, block, STEPS)


def compare(case: TensorParallelCase, layout: SharedModel, adversary: str, arms: tuple[str, ...]) -> dict[str, Any]:
    """Train the case with stock on the CPU accelerator, then the arms on the device, and return the differences."""
    expected = run(case, layout, None, STEPS)
    found = {}
    for arm in arms:
        with counted_splits() as splits:
            record = train_on_device(case, layout, adversary, arm)
        found[arm] = {
            "class": record.optimizer_class,
            "deferred": record.deferred,
            "placements": sorted(record.placements),
            "split on": sorted(splits),
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
