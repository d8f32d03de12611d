"""Write to parameters of split masters, through interfaces of DeepSpeed and behind them, while the device trains.

The first answers compare training in which all parameters are written after each step with stock on the CPU
accelerator. The others have one random write to a partition each, with ``param.ds_tensor``: either an error names the
parameter, or the training has the bits of stock, which forgets such a write at the next update.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deep_opt_states.runtime.failure import UpdateFailed
from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import PLAIN, Settings
from tests.zero.parity.case import SPLIT_MASTERS, STREAMED, STRIDE_2, WITHOUT_FORWARD_OVERLAP, Case
from tests.zero.parity.cases import RULES
from tests.zero.parity.training import Block, Record, differences, run_variant
from tests.zero.races.faults import RESIDENT
from tests.zero.races.reads_between_steps import after_each_step, before_each_backward
from tests.zero.races.writes_between_steps import (
    write_and_partition,
    write_gathered,
    write_local_masters,
    write_masters,
)

ADVERSARIES = {"plain": PLAIN, "lazy": Settings(lazy=True, lazy_s=20.0)}
BLOCKS: dict[str, dict[str, Any]] = {
    name: {**block, **SPLIT_MASTERS}
    for name, block in {"stride": STRIDE_2, "streamed": STREAMED, "resident": RESIDENT, "rules": RULES}.items()
}
SEEDS = 10
"""The number of random writes by placement and time of the write."""


def write_flat_buffers(optimizer: Any) -> None:
    """Multiply all parameters by 0.5 through the optimizer's attribute, which DeepSpeed's own loaders use."""
    for flat in optimizer.fp16_partitioned_groups_flat:
        flat.data.mul_(0.5)


KNOWN = (write_gathered, write_and_partition, write_flat_buffers, write_masters, write_local_masters)
TIMES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "after a step": (after_each_step, WITHOUT_FORWARD_OVERLAP),
    "while an update is in flight": (after_each_step, {}),
    "before a backward": (before_each_backward, {}),
}
"""When a partition is written to, and the part of the config block for that."""

IN_FLIGHT = "while an update is in flight"
PLACEMENTS = {**dict.fromkeys(TIMES, tuple(BLOCKS)), IN_FLIGHT: ("streamed", "resident")}
"""The placements by time. While the CPU updates a parameter, what a script reads to change it is not defined."""

CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.neg_,
    torch.Tensor.zero_,
    lambda values: values.mul_(0.5),
    lambda values: values[values.numel() // 2].add_(1.0),
    lambda values: values.copy_(values.flip(0)),
    lambda values: values[-1:].neg_(),
)


class RandomWrite:
    """A write to one random partition of each rank, at the call of a random number."""

    def __init__(self, seed: int, steps: int) -> None:
        chance = random.Random(seed)
        # The next update compares. What it finds is raised at the latest when the update after it begins.
        self._at = chance.randrange(steps - 2)
        self._chosen = chance.random()
        self._change = chance.choice(CHANGES)
        self._calls = 0
        self.changed = ""
        """The name of the parameter, if the write has changed its bits."""

    def __call__(self, optimizer: Any) -> None:
        self._calls += 1
        if self._calls - 1 != self._at:
            return
        names = {param.ds_id: name for name, param in optimizer.module.named_parameters()}
        params = [param for group in optimizer.fp16_groups for param in group]
        param = params[int(self._chosen * len(params))]
        partition = param.ds_tensor.data
        before = partition.cpu().clone()
        self._change(partition)
        if not torch.equal(before.view(torch.int16), partition.cpu().view(torch.int16)):
            self.changed = names[param.ds_id]


def known_writes(case: Case) -> None:
    """Print the differences from stock for each known write, placement and adversary."""
    for write in KNOWN:
        with after_each_step(write)():
            stock = run_variant(case, None)
        for placement, block in BLOCKS.items():
            for adversary, settings in ADVERSARIES.items():
                with plugged(settings), after_each_step(write)():
                    found = run_variant(case, block)
                answer(
                    {
                        "kind": "known",
                        "label": f"{write.__name__}, {placement}, {adversary}",
                        "differences": differences(stock, found),
                    }
                )


def stock_of(case: Case, time: str, seed: int) -> list[Record]:
    """Return stock's records that are right.

    An update in flight overwrites the parameters of a unit, so that a write before that is lost, as if there was none.
    """
    with_write, _, _ = random_write(case, None, time, seed)
    assert with_write is not None
    return [with_write, run_variant(case, None)] if time == IN_FLIGHT else [with_write]


def random_write(case: Case, block: Block, time: str, seed: int) -> tuple[Record | None, str, str]:
    """Return the record, the error if there was one, and the name of the parameter that was changed."""
    write = RandomWrite(seed, case.steps)
    try:
        with TIMES[time][0](write)():
            return run_variant(case, block), "", write.changed
    except UpdateFailed as failed:
        return None, str(failed), write.changed


def unknown_writes(case: Case) -> None:
    """Print for each random write whether it was noticed or forgotten as by stock, or neither."""
    for time in TIMES:
        for number, placement in enumerate(PLACEMENTS[time]):
            block = BLOCKS[placement]
            for seed in range(SEEDS * number, SEEDS * (number + 1)):
                with plugged(PLAIN):
                    found, error, changed = random_write(case, {**block, **TIMES[time][1]}, time, seed)
                differ = []
                if found is not None:
                    differ = min((differences(right, found) for right in stock_of(case, time, seed)), key=len)
                answer(
                    {
                        "kind": "unknown",
                        "label": f"{time}, {placement}, seed {seed}",
                        "changed": changed,
                        "error": error,
                        "differences": differ,
                    }
                )


def main() -> None:
    case = Case(name="writes", blocks=(), world_size=dist.get_world_size(), steps=4, clip=0.3)
    known_writes(case)
    if dist.get_world_size() == 1:
        unknown_writes(case)


if __name__ == "__main__":
    with software_process_group():
        main()
