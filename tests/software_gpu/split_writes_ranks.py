"""Write to parameters of split masters, through interfaces of DeepSpeed and behind them, while the device trains.

The first answers compare training in which all parameters are written after each step with stock on the CPU
accelerator. The others have one random write to a partition of one rank each, with ``param.ds_tensor``: either an error
names the parameter, or the training has the bits of stock, which forgets such a write at the next update. At the end
the parameters are read, and a checkpoint is saved, which raises a finding that no update follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.runtime.failure import UpdateFailed
from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import PLAIN, Settings
from tests.zero.parity.case import SPLIT_MASTERS, STREAMED, STRIDE_2, WITHOUT_FORWARD_OVERLAP, Case
from tests.zero.parity.cases import RULES
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, differences, run_variant, shared_folder
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
SEEDS = 5
"""The number of random writes in random steps, by placement and time of the write."""


def write_flat_buffers(optimizer: Any) -> None:
    """Multiply all parameters by 0.5 through the optimizer's attribute, which DeepSpeed's own loaders use."""
    for flat in optimizer.fp16_partitioned_groups_flat:
        flat.data.mul_(0.5)


KNOWN = (write_gathered, write_and_partition, write_flat_buffers, write_masters, write_local_masters)


def when_an_update_has_begun(write: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[object]]:
    """Call ``write`` with the optimizer when the update has compared all sums, before it reads the units.

    With stock, that is after the update.
    """
    post_step = DeepSpeedZeroOptimizer_Stage3._post_step

    def write_and_end(optimizer: Any, *args: Any) -> None:
        write(optimizer)
        post_step(optimizer, *args)

    return lambda: mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "_post_step", write_and_end)


BEGUN, IN_FLIGHT = "when an update has begun", "while an update is in flight"
TIMES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "after a step": (after_each_step, WITHOUT_FORWARD_OVERLAP),
    BEGUN: (when_an_update_has_begun, {}),
    IN_FLIGHT: (after_each_step, {}),
    "before a backward": (before_each_backward, {}),
}
"""When a partition is written to, and the part of the config block for that."""

RANDOM_TIMES = [time for time in TIMES if time != BEGUN]
"""The times of writes in random steps. The others are in each step."""

PLACEMENTS = {**dict.fromkeys(TIMES, tuple(BLOCKS)), **dict.fromkeys((BEGUN, IN_FLIGHT), ("streamed", "resident"))}
"""The placements by time. While the CPU updates a parameter, what a script reads to change it is not defined."""

CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.neg_,
    torch.Tensor.zero_,
    lambda values: values.mul_(0.5),
    lambda values: values[values.numel() // 2].add_(1.0),
    lambda values: values.copy_(values.flip(0)),
    lambda values: values[-1:].neg_(),
)


def read_nothing(engine: Any, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    return {}


def evaluate(engine: Any, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Return the loss of a forward without gradients."""
    x, target = (tensor.to(engine.device) for tensor in batch(case, dist.get_rank(), 0, torch.bfloat16))
    with torch.no_grad():
        return {"loss": engine(x, target, 1.0, 1.0).cpu()}


def gather(engine: Any, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Return all parameters."""
    named = dict(engine.module.named_parameters())
    with zero.GatheredParameters(list(named.values())):
        return {name: param.detach().cpu().clone() for name, param in named.items()}


def save_16bit(engine: Any, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters that rank 0 saves."""
    engine.save_16bit_model(str(folder))
    return torch.load(folder / "pytorch_model.bin") if dist.get_rank() == 0 else {}


READS = (evaluate, gather, save_16bit, read_nothing)
"""The reads after the last step. A checkpoint is saved afterwards."""

Read = Callable[[Any, Case, Path], dict[str, torch.Tensor]]


@contextmanager
def read_after_last_step(case: Case, read: Read) -> Iterator[dict[str, torch.Tensor]]:
    """Read after the last step and save a checkpoint. The context yields the tensors that were read."""
    step, calls, found = DeepSpeedEngine.step, [0], dict[str, torch.Tensor]()

    def step_and_read(engine: Any, *args: Any) -> None:
        step(engine, *args)
        calls[0] += 1
        if calls[0] == case.steps:
            found.update(read(engine, case, folder))
            engine.save_checkpoint(str(folder))

    with shared_folder() as folder, mock.patch.object(DeepSpeedEngine, "step", step_and_read):
        yield found


class RandomWrite:
    """A write to a random partition of one rank, at call number ``at``, which counts from zero."""

    def __init__(self, seed: int, at: int) -> None:
        chance = random.Random(seed)
        self._at = at
        self._rank = chance.randrange(dist.get_world_size())
        self._change = chance.choice(CHANGES)
        self._chance = chance
        self._calls = 0
        self.changed = ""
        """The name of the parameter, if the write has changed its bits."""

    def __call__(self, optimizer: Any) -> None:
        self._calls += 1
        if self._calls - 1 != self._at or dist.get_rank() != self._rank:
            return
        names = {param.ds_id: name for name, param in optimizer.module.named_parameters()}
        params = [param for group in optimizer.fp16_groups for param in group]
        # Large parameters more often: small ones are persistent, and updated when an update has begun.
        (param,) = self._chance.choices(params, [param.ds_numel**0.5 for param in params])
        # The padding of the last partition is not initialized, and has no value that stock has, too.
        numel = param.ds_tensor.numel()
        partition = param.ds_tensor.data[: max(0, min(numel, param.ds_numel - dist.get_rank() * numel))]
        before = partition.cpu().clone()
        self._change(partition)
        if not torch.equal(before.view(torch.int16), partition.cpu().view(torch.int16)):
            self.changed = names[param.ds_id]


def training_case(world_size: int) -> Case:
    """Return the training of all writes."""
    saves_16bit = {"stage3_gather_16bit_weights_on_model_save": True}
    return Case(name="writes", blocks=(), world_size=world_size, steps=4, clip=0.3, zero=saves_16bit)


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


@dataclass(frozen=True)
class WriteCase:
    """One random write in the step ``at``, and the read after the last step."""

    training: Case
    time: str
    placement: str
    seed: int
    at: int
    read: Read

    def __str__(self) -> str:
        return f"{self.time}, {self.placement}, step {self.at}, {self.read.__name__}, seed {self.seed}"

    def run(self, block: Block) -> Found:
        """Train with the write."""
        write = RandomWrite(self.seed, self.at)
        record, error, read = None, "", {}
        try:
            with TIMES[self.time][0](write)(), read_after_last_step(self.training, self.read) as read:
                record = run_variant(self.training, block)
        except UpdateFailed as failed:
            error = str(failed)
        return Found(record, read, error, write.changed)

    def stock(self) -> list[Found]:
        """Return the results of stock that are right.

        An update in flight overwrites the parameters of a unit, so that a write before that is lost, as if there was
        none.
        """
        found = [self.run(None)]
        if self.time in (BEGUN, IN_FLIGHT):
            if self.read not in _WITHOUT_WRITE:
                _WITHOUT_WRITE[self.read] = replace(self, at=self.training.steps).run(None)
            found.append(_WITHOUT_WRITE[self.read])
        return found

    def answer(self) -> dict[str, Any]:
        """Return whether the write was noticed or forgotten as by stock, or neither."""
        with plugged(PLAIN):
            found = self.run({**BLOCKS[self.placement], **TIMES[self.time][1]})
        return {
            "kind": "unknown",
            "label": str(self),
            "changed": found.changed,
            "error": found.error,
            "differences": min((found.differences_from(right) for right in self.stock()), key=len),
        }


@dataclass(frozen=True)
class Found:
    """The results of a training with a random write.

    ``record`` is None if there was an ``error``, and ``read`` is empty if it came before the read. ``changed`` is the
    name of the parameter of this rank that was changed.
    """

    record: Record | None
    read: dict[str, torch.Tensor]
    error: str
    changed: str

    def differences_from(self, right: Found) -> list[str]:
        """Return the differences of the tensors that were read, and of the records if there was no error."""
        assert right.record is not None
        read = differences(Record(tensors=right.read), Record(tensors=self.read)) if self.read else []
        return read + (differences(right.record, self.record) if self.record is not None else [])


_WITHOUT_WRITE: dict[Read, Found] = {}
"""The results of stock without a write, by the read after the last step."""


def write_cases(training: Case) -> Iterator[WriteCase]:
    """Yield random writes in random steps, then one in each step, and in the last one for each read."""
    for time in RANDOM_TIMES if training.world_size == 1 else ():
        # The update in flight may overwrite a part of the write. So another one must follow, which notices the rest.
        steps = training.steps - (time == IN_FLIGHT)
        for number, placement in enumerate(PLACEMENTS[time]):
            for seed in range(SEEDS * number, SEEDS * (number + 1)):
                at = random.Random(seed).randrange(steps)
                yield WriteCase(training, time, placement, seed, at, READS[seed % len(READS)])
    for number, placement in enumerate(PLACEMENTS[BEGUN]):
        ends = [*zip(range(training.steps - 1), READS, strict=False), *((training.steps - 1, read) for read in READS)]
        for seed, (at, read) in enumerate(ends, 100 * (number + 1)):
            yield WriteCase(training, BEGUN, placement, seed, at, read)


def main() -> None:
    case = training_case(dist.get_world_size())
    known_writes(case)
    for write_case in write_cases(case):
        answer(write_case.answer())


if __name__ == "__main__":
    with software_process_group():
        main()
