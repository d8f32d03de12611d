"""Load valid checkpoints that are unlike the engine that loads them, and answer with the problems of each.

Stock saves them. Stock and the plugin load each, and must then have the same states: a checkpoint that stock can
load must not be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from tests.fork_server import import_all
from tests.launch import answer
from tests.zero.checkpoints.malformed_ranks import Loaded, everywhere
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import closing_engine, shared_folder, train
from tests.zero.process_group import process_group

STEPS = 3


@dataclass(frozen=True)
class Engines:
    """Two engines, stock and the plugin's, whose states are the same, and a folder for checkpoints."""

    stock: Any
    ours: Any
    folder: Path

    def both(self, action: Callable[[Any], object]) -> None:
        for engine in (self.stock, self.ours):
            action(engine)

    def problems_of_loading(self, **options: Any) -> list[str]:
        """Load the checkpoint in the folder with both, and return each difference between them."""
        try:
            self.stock.load_checkpoint(str(self.folder), **options)
        except Exception as error:  # noqa: BLE001 (the checkpoint is no valid one)
            return [f"stock: {type(error).__name__}: {error}"]
        try:
            self.ours.load_checkpoint(str(self.folder), **options)
        except Exception as error:  # noqa: BLE001 (any error is a problem)
            return [f"{type(error).__name__}: {error}"]
        return Loaded.from_engine(self.stock).differences(Loaded.from_engine(self.ours))


# LR schedulers

Scheduler = Callable[[torch.optim.Optimizer], Any]


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    inner = (lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 4]))
    return lr_scheduler.ChainedScheduler(inner, optimizer)


@dataclass(frozen=True)
class Rescheduled:
    """The LR schedulers before and after the save, and a key that another release of PyTorch does not save."""

    before: Scheduler
    after: Scheduler
    lacks: str = ""


def unchanged(make: Scheduler) -> Rescheduled:
    return Rescheduled(make, make)


LAMBDA = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step)

SCHEDULERS = {
    "SequentialLR": unchanged(sequential),
    "ChainedScheduler": unchanged(chained),
    "LambdaLR of another release": Rescheduled(LAMBDA, LAMBDA, lacks="_is_initial"),
    "MultiStepLR with other milestones": Rescheduled(
        partial(lr_scheduler.MultiStepLR, milestones=[1, 2]), partial(lr_scheduler.MultiStepLR, milestones=[5])
    ),
    "ReduceLROnPlateau": unchanged(lr_scheduler.ReduceLROnPlateau),
    "OneCycleLR": unchanged(partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)),
    "CyclicLR": unchanged(partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, cycle_momentum=False)),
    "OneCycle of DeepSpeed": unchanged(partial(lr_schedules.OneCycle, cycle_min_lr=0.1, cycle_max_lr=0.2)),
}


def reschedule(engine: Any, make: Scheduler) -> None:
    engine.lr_scheduler = make(engine.basic_optimizer)
    for _ in range(STEPS):
        # The argument is the metric of ReduceLROnPlateau, and the number of the step of all others.
        engine.lr_scheduler.step(*([1.0] if isinstance(engine.lr_scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def loads_scheduler(schedulers: Rescheduled, engines: Engines) -> list[str]:
    before = engines.stock.lr_scheduler
    reschedule(engines.stock, schedulers.before)
    engines.stock.save_checkpoint(str(engines.folder))
    if schedulers.lacks:
        change_models(engines.folder, lambda saved: saved["lr_scheduler"].pop(schedulers.lacks))
    engines.both(partial(reschedule, make=schedulers.after))
    found = engines.problems_of_loading()
    engines.both(lambda engine: setattr(engine, "lr_scheduler", before))
    return found


def change_models(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of each file with the model's state."""
    if dist.get_rank() == 0:
        for path in folder.glob("*/*model_states.pt"):
            saved = torch.load(path, weights_only=False)
            change(saved)
            torch.save(saved, path)
    dist.barrier()


JOBS: dict[str, Callable[[Engines], list[str]]] = {
    **{name: partial(loads_scheduler, schedulers) for name, schedulers in SCHEDULERS.items()},
}


@contextmanager
def both_engines(folder: Path) -> Iterator[tuple[Any, Any]]:
    case = Case(name="accepted", blocks=(STRIDE_2,), world_size=dist.get_world_size(), steps=STEPS, frozen=True)
    with closing_engine(case, None) as stock, closing_engine(case, STRIDE_2) as ours:
        for engine in (stock, ours):
            train(engine, case, folder)
        yield stock, ours


def main() -> None:
    with shared_folder() as folder, both_engines(folder) as (stock, ours):
        for name, job in JOBS.items():
            found = everywhere(partial(job, Engines(stock, ours, folder / name)))
            if dist.get_rank() == 0:
                answer({"name": name, "problems": [problem for rank in found for problem in rank]})


if __name__ == "__main__":
    import_all()
    with process_group():
        main()
