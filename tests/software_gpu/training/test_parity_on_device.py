"""Check that training on the device, with stock or the plugin, is bit-identical to stock on the CPU accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.config import Config
from deep_opt_states.zero.start import planning
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS
from deep_opt_states.zero.step.measured_windows import FIRST_UPDATES
from tests.model.profiles import profile
from tests.ranks import ranks
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES, MachineRates
from tests.tiers import thorough
from tests.zero.parity.case import Case
from tests.zero.parity.cases import CASES, DEPARTURES, QUICK
from tests.zero.parity.training import Block, assert_same_bits, run
from tests.zero.tensor_parallel import cases as tensor_parallel
from tests.zero.tensor_parallel.cases import TensorParallelCase
from tests.zero.tensor_parallel.layouts import layouts

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
"""The size of the chunks of our copies, into which the states of the small models are divided."""


Arm = tuple[str, Block, Block]


def arms_of(case: Case, blocks: tuple[Block, ...], adversary: str) -> Iterator[Arm]:
    for block in blocks:
        if not case.resume:
            yield adversary, block, block
        elif block is not None:
            yield adversary, None, block
            yield adversary, block, None


def chosen() -> Iterator[tuple[Case, list[Arm]]]:
    """Yield the cases of ``make test``, with 6 steps, each with every third block, plain and lazy in turn."""
    cases = [case for case in QUICK if case.world_size == dist.get_world_size()]
    for position, case in enumerate(cases):
        blocks: list[Block] = [*(case.blocks[position % 3 :: 3] or case.blocks[:1])]
        if position % 5 == 1 and case not in DEPARTURES:
            blocks.append(None)
        # A checkpoint is loaded at most 2 steps after it was saved.
        reload = None if case.reload is None else (3, 3 + min(2, case.reload[1] - case.reload[0]))
        poisoned = {step: factor for step, factor in case.poisoned.items() if step < 6}
        yield (
            replace(case, steps=6, reload=reload, poisoned=poisoned),
            [
                arm
                for index, block in enumerate(blocks)
                for arm in arms_of(case, (block,), ("plain", "lazy")[(position + index) % 2])
            ],
        )


def every_case(adversary: str) -> Iterator[tuple[Case, list[Arm]]]:
    for case in (*CASES, *DEPARTURES):
        if case.world_size == dist.get_world_size():
            stock = () if case in DEPARTURES else (None,)
            yield case, [*arms_of(case, (*stock, *case.blocks), adversary)]


def plans(block: Block) -> bool:
    return block is not None and Config(**block).may_plan


def check(case: Case, arms: list[Arm]) -> None:
    """Train the case with stock on the CPU, for departures on gradients of zero, and the arms on the device."""
    expected = run(replace(case, zero_instead_of_skip=True), None, None)
    # Training that changed nothing would also have equal bits.
    assert len(set(expected.numbers["loss"])) > 2
    rates = MACHINE if any(map(plans, case.blocks)) else MachineRates()
    for adversary, saved_by, block in arms:
        settings = ADVERSARIES[adversary]
        with (
            plugged(replace(settings, rates=MACHINE))
            if rates == MACHINE
            else plugged(settings, chunk_bytes=CHUNK_BYTES),
            mock.patch.object(planning, "quick_profile", return_value=profile()),
        ):
            found = run(case, saved_by, block)
        label = f"{case.name}, {adversary}, saved by {saved_by}, resumed by {block}"
        assert_same_bits(expected, found)
        assert found.optimizer_class.startswith("DeepSpeed" if block is None else "DeepOptimizerStates"), label
        if block is not None and block.get("overlap_forward", True):
            # Where the plugin plans, the first updates end inside step(), so that windows can be measured.
            updates = case.steps - len(case.poisoned) - (FIRST_UPDATES if plans(block) else 0)
            assert found.deferred >= updates // 2, f"{label}: too few deferred updates"


@pytest.mark.P1
@pytest.mark.P2
@pytest.mark.P4
@pytest.mark.parametrize("adversary", ["", thorough("plain"), thorough("lazy")])
@ranks(1, 2, group=software_process_group, timeout_s=900)
def test_training_on_the_device_is_bit_identical_to_stock_on_the_cpu_accelerator(adversary: str) -> None:
    trained_cases = [*(every_case(adversary) if adversary else chosen())]
    assert len(trained_cases) > 5
    for case, arms in trained_cases:
        print(f"case: {case.name}", flush=True)
        check(case, arms)


@pytest.mark.P1
@pytest.mark.P2
@ranks(2, group=software_process_group)
def test_training_with_tensor_parallelism_on_the_device_is_bit_identical_to_stock() -> None:
    """Train until the plugin has planned with the windows and the memory that it measured in the first steps."""
    layout, case = layouts()["mpu"], TensorParallelCase("mpu", "fp16", "plain", zero_init=False)
    stock = tensor_parallel.run(case, layout, None, FIRST_STEPS + 3)
    with (
        plugged(replace(ADVERSARIES["lazy"], rates=MACHINE)),
        mock.patch.object(planning, "quick_profile", return_value=profile()),
    ):
        block = tensor_parallel.block_of(tensor_parallel.BY_NAME, layout)
        ours = tensor_parallel.run(case, layout, block, FIRST_STEPS + 3)
    assert_same_bits(stock, ours)
    assert ours.placements == {"cpu", "resident", "streamed"}
    assert ours.deferred >= 2, "too few updates that overlap with forward"
    assert stock.numbers["skipped"][-1]
