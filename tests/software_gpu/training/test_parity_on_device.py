"""Check that training on the device, with stock and with the plugin, has the bits of stock on the CPU accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.config import Config
from deep_opt_states.zero.start import planning
from deep_opt_states.zero.step.measured_windows import FIRST_UPDATES
from tests.model.profiles import profile
from tests.ranks import on_ranks, once
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES, MachineRates
from tests.zero.parity.case import Case
from tests.zero.parity.cases import CASES, DEPARTURES, QUICK
from tests.zero.parity.training import Block, Record, Result, differences, results_in_turn, run_resumed, run_variant

CHOICE, EVERY_CASE = "choice", ("plain", "lazy")
"""The selection of ``make test``, its parity cases shortened; and the adversaries under which every case trains with
stock and with every config block."""

MACHINE = MachineRates(
    h2d=5e10,
    d2h=5e10,
    both_directions=5e10,
    pageable=1e10,
    flops_per_s=5e14,
    device_bytes_per_s=2.5e12,
    adam_params_per_s=7e10,
    launch_s=5e-6,
    copy_latency_s=1e-5,
)
"""An emulated machine with the rates of a GPU, for the cases that plan, and measure the windows of training."""

CHUNK_BYTES = 4096
"""The size of the chunks of our copies, into which the states of the small models are divided.

The cases that plan have chunks of the default size, since the profile measures larger copies.
"""


class ParityArm(NamedTuple):
    """A training run on the device. ``saved_by`` and ``resumed_by`` differ in cases that resume."""

    adversary: str
    saved_by: Block
    resumed_by: Block

    def __str__(self) -> str:
        names = ["stock" if block is None else str(block) for block in (self.saved_by, self.resumed_by)]
        return f"{self.adversary}: {' to '.join(dict.fromkeys(names))}"


def arms_of(case: Case, blocks: tuple[Block, ...], adversary: str) -> Iterator[ParityArm]:
    """Yield the arms of these blocks; a case that resumes does so with stock and with the plugin in turn."""
    for block in blocks:
        if not case.resume:
            yield ParityArm(adversary, block, block)
        elif block is not None:
            yield ParityArm(adversary, None, block)
            yield ParityArm(adversary, block, None)


def selected(selection: str, world_size: int) -> Iterator[tuple[Case, list[ParityArm]]]:
    """Yield the cases of the selection for this number of ranks, each with its arms on the device."""
    cases = [
        case for case in (QUICK if selection == CHOICE else (*CASES, *DEPARTURES)) if case.world_size == world_size
    ]
    for position, case in enumerate(cases):
        stock: tuple[Block, ...] = () if case in DEPARTURES else (None,)
        if selection == CHOICE:
            # Every third block, plain and lazy in turn, and in every fifth case also stock.
            chosen = case.blocks[position % 3 :: 3] or case.blocks[:1]
            if position % 5 == 1:
                chosen += stock
            yield (
                shortened(case),
                [
                    arm
                    for index, block in enumerate(chosen)
                    for arm in arms_of(case, (block,), EVERY_CASE[(position + index) % 2])
                ],
            )
        else:
            yield case, [*arms_of(case, (*stock, *case.blocks), selection)]


def shortened(case: Case) -> Case:
    """Return the case with 6 steps, and a checkpoint that is loaded at most 2 steps after it was saved."""
    reload = None if case.reload is None else (3, 3 + min(2, case.reload[1] - case.reload[0]))
    poisoned = {step: factor for step, factor in case.poisoned.items() if step < 6}
    return replace(case, steps=6, reload=reload, poisoned=poisoned)


def trained_record(case: Case, saved_by: Block, resumed_by: Block) -> Record:
    return run_resumed(case, saved_by, resumed_by) if case.resume else run_variant(case, resumed_by)


def compare(case: Case, arms: list[ParityArm]) -> dict[str, Any]:
    """Train the case with stock on the CPU accelerator, then the arms on the device, and return the differences.

    Departures from stock are compared with stock on gradients of zero. The quick profile has given rates: a profile of
    the device, on a machine under load, can lack a rate that the rules by name need.
    """
    expected = trained_record(replace(case, zero_instead_of_skip=True), None, None)
    found: dict[str, Any] = {}
    for arm in arms:
        settings = ADVERSARIES[arm.adversary]
        plans = any(map(_plans, case.blocks))
        with (
            plugged(replace(settings, rates=MACHINE)) if plans else plugged(settings, chunk_bytes=CHUNK_BYTES),
            mock.patch.object(planning, "quick_profile", return_value=profile()),
        ):
            record = trained_record(case, arm.saved_by, arm.resumed_by)
        found[str(arm)] = {
            "class": record.optimizer_class,
            "deferred": record.deferred,
            "plans": _plans(arm.resumed_by),
            "differences": differences(expected, record),
        }
    return {"arms": found, "numbers": expected.numbers}


def _plans(block: Block) -> bool:
    return block is not None and Config(**block).may_plan


STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
WORLD_SIZES = {CHOICE: (1, 2), **dict.fromkeys(EVERY_CASE, (1, 2, 4))}
"""The numbers of ranks by selection of cases."""


def parameters() -> Iterator[Any]:
    """Yield a test parameter per case; one worker of pytest-xdist trains all cases of a selection and world size."""
    for selection, world_sizes in WORLD_SIZES.items():
        for world_size in world_sizes:
            marks = [pytest.mark.xdist_group(f"parity on device {selection} {world_size}")]
            marks += [] if selection == CHOICE else [pytest.mark.thorough]
            for case, arms in selected(selection, world_size):
                name = f"{selection}: {case.name}"
                yield pytest.param(selection, case, [str(arm) for arm in arms], id=name, marks=marks)


@once
def trained(selection: str, world_size: int) -> list[dict[str, Result]]:
    """Return the results of each rank by name. One process trains all cases of the world size on both accelerators."""
    return on_ranks(world_size, train_cases, selection, group=software_process_group, timeout_s=900)


def train_cases(selection: str) -> dict[str, Result]:
    cases = selected(selection, dist.get_world_size())
    return dict(results_in_turn((case.name, partial(compare, case, arms)) for case, arms in cases))


@pytest.mark.P1
@pytest.mark.P2
@pytest.mark.P4
@pytest.mark.parametrize(("selection", "case", "arms"), list(parameters()))
def test_training_on_the_device_has_the_bits_of_stock_on_the_cpu_accelerator(
    selection: str, case: Case, arms: list[str]
) -> None:
    for rank, by_name in enumerate(trained(selection, case.world_size)):
        assert case.name in by_name, "an earlier case failed"
        result = by_name[case.name]
        assert "error" not in result, result["error"]
        assert list(result["arms"]) == arms
        for arm, found in result["arms"].items():
            assert found["differences"] == [], f"rank {rank}, {arm}"
            assert found["class"] == (STOCK if arm.endswith("stock") else OURS)
            if not arm.endswith("stock") and "'overlap_forward': False" not in arm:
                # Where the plugin plans, the first updates end inside step(), so that windows can be measured.
                inside = FIRST_UPDATES if found["plans"] else 0
                updates = case.steps - len(case.poisoned) - inside
                assert found["deferred"] >= updates // 2, f"{arm}: too few deferred updates"
        # Training that changed nothing would have equal bits, too.
        assert len(set(result["numbers"]["loss"])) > 2
