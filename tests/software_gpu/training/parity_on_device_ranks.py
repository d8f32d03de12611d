"""Train parity cases on the device, with stock and with the plugin, and compare with stock on the CPU accelerator.

The argument is the name of a selection: ``CHOICE``, or an adversary. Every rank prints one answer per case, with the
differences of each arm: of stock, and of each config block. One process trains all cases of the world size on both
accelerators.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from deep_opt_states.config import Config
from deep_opt_states.zero.start import planning
from tests.launch import answer
from tests.model.profiles import profile
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES, MachineRates
from tests.zero.parity.case import Case
from tests.zero.parity.case_runs import results_in_turn
from tests.zero.parity.cases import CASES, DEPARTURES, QUICK
from tests.zero.parity.training import Block, Record, differences, run_resumed, run_variant

CHOICE = "choice"
"""The selection of ``make test``: its parity cases, shortened."""

EVERY_CASE = ("plain", "lazy")
"""The adversaries under which every case trains with stock and with every config block."""

ONE_OF_STOCK = 5
"""In the choice, stock is trained in every fifth case."""

ONE_OF_OTHERS = 4
"""Under the other adversaries, which sleep, every fourth case is trained, with one block."""

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


@dataclass(frozen=True)
class ParityArm:
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
            # One rank trains every second block, plain and lazy in turn; two ranks train every third one.
            chosen = case.blocks[position % (world_size + 1) :: world_size + 1] or case.blocks[:1]
            arms = [
                arm
                for index, block in enumerate(chosen)
                for arm in arms_of(case, (block,), EVERY_CASE[(position + index) % 2])
            ]
            if position % ONE_OF_STOCK == 1:
                arms += arms_of(case, stock, EVERY_CASE[position % 2])
            yield shortened(case), arms
        elif selection in EVERY_CASE:
            yield case, [*arms_of(case, (*stock, *case.blocks), selection)]
        elif position % ONE_OF_OTHERS == 0:
            yield shortened(case), [*arms_of(case, case.blocks[position % len(case.blocks) :][:1], selection)]


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
    return {"name": case.name, "arms": found, "numbers": expected.numbers}


def _plans(block: Block) -> bool:
    return block is not None and Config(**block).may_plan


def main(selection: str) -> None:
    cases = selected(selection, dist.get_world_size())
    for name, result in results_in_turn((case.name, partial(compare, case, arms)) for case, arms in cases):
        answer({"name": name, **result})


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1])
