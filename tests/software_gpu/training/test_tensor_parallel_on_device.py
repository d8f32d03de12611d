"""Check that training beside tensor parallelism on the device has the bits of stock on the CPU accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.config import Config
from deep_opt_states.zero.start import planning
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS
from deep_opt_states.zero.step.measured_windows import MeasuredWindows
from perf_model.prediction.overlap_windows import Windows
from tests.model.profiles import RATES, profile
from tests.ranks import on_ranks, once
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.software_gpu.training.test_parity_on_device import CHUNK_BYTES, MACHINE
from tests.zero.parity.case_runs import Result, results_in_turn
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
    """Train the case on the device. The quick profile has given rates, as in ``test_parity_on_device``."""
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


CLASSES = {STOCK: "DeepSpeedZeroOptimizer_Stage3"}
OURS = "DeepOptimizerStates_Stage3"


@once
def trained(selection: str) -> list[dict[str, Result]]:
    """Return the results of each rank by name."""
    return on_ranks(2, train_cases, selection, group=software_process_group, timeout_s=900)


def train_cases(selection: str) -> dict[str, Result]:
    by_name = layouts()
    work = (
        (case.name, partial(compare, case, by_name[case.layout], adversary, arms))
        for case, adversary, arms in selected(selection)
    )
    return dict(results_in_turn(work))


def parameters() -> list[Any]:
    """Return a test parameter per case and selection; one worker of pytest-xdist trains a selection."""
    return [
        pytest.param(
            selection,
            case,
            arms,
            id=f"{selection}: {case.name}",
            marks=[
                pytest.mark.xdist_group(f"tensor parallel on device {selection}"),
                *([] if selection == CHOICE else [pytest.mark.thorough]),
            ],
        )
        for selection in (CHOICE, *EVERY_CASE)
        for case, _, arms in selected(selection)
    ]


@pytest.mark.promise("P1", "P2")
@pytest.mark.parametrize(("selection", "case", "arms"), parameters())
def test_training_beside_tensor_parallelism_on_the_device_has_the_bits_of_stock(
    selection: str, case: TensorParallelCase, arms: tuple[str, ...]
) -> None:
    for rank, by_name in enumerate(trained(selection)):
        assert case.name in by_name, "an earlier case failed"
        result = by_name[case.name]
        assert "error" not in result, result["error"]
        assert tuple(result["arms"]) == arms
        for arm, found in result["arms"].items():
            assert found["differences"] == [], f"rank {rank}, {arm}"
            assert found["class"] == CLASSES.get(arm, OURS)
            if arm.startswith("planned"):
                assert found["placements"] != ["cpu"], "the device updates nothing"
            if arm != STOCK:
                assert found["deferred"] >= 2, f"{arm}: too few updates that overlap with forward"
        numbers = result["numbers"]
        assert numbers["skipped"][-1] == (case.dtype == "fp16"), "the overflow on one rank skips one step on all"
        assert len(set(numbers["loss"])) > 2, "training that changes nothing has equal bits, too"


def test_the_choice_has_an_overflow_on_one_rank_of_a_model() -> None:
    cases = [case for case, *_ in selected(CHOICE)]
    assert {case.dtype for case in cases} == {"bf16", "fp16"}
    assert {case.layout for case in cases} == {"AutoTP", "mpu"}
