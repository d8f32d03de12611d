"""Check that no valid checkpoint is refused before it is loaded, and that no rank waits for one that cannot check.

Most checkpoints are valid, though unlike the engine that loads them. Stock saves them. Stock and the plugin load each,
and must then have the same states: a checkpoint that stock can load must not be refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime import lr_schedules
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.optim import lr_scheduler

from deep_opt_states.zero.checkpoint_check import CheckpointError, check_before_loading
from deep_opt_states.zero.checkpoint_contents import shown
from deep_opt_states.zero.internals.compat import has_custom_loading
from deep_opt_states.zero.internals.lr_schedulers import problem_of_scheduler
from tests.ranks import on_ranks, once
from tests.zero.checkpoints.test_malformed import Loaded, everywhere, three_parts_missing
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import closing_engine, shared_folder, train

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


Scheduler = Callable[[torch.optim.Optimizer], Any]


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    of_lambda = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return lr_scheduler.ChainedScheduler([lr_scheduler.MultiStepLR(optimizer, [1, 4]), of_lambda], optimizer)


@dataclass(frozen=True)
class Rescheduled:
    """The LR schedulers before and after the save, and a key that another release of PyTorch does not save."""

    before: Scheduler
    after: Scheduler
    lacks: str = ""


LAMBDA = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step)

PLATEAU = lr_scheduler.ReduceLROnPlateau
CYCLE = partial(lr_schedules.OneCycle, cycle_min_lr=0.1, cycle_max_lr=0.2)

SCHEDULERS = {
    "SequentialLR": Rescheduled(sequential, sequential),
    "ChainedScheduler": Rescheduled(chained, chained),
    "LambdaLR of another release": Rescheduled(LAMBDA, LAMBDA, lacks="_is_initial"),
    "MultiStepLR": Rescheduled(
        partial(lr_scheduler.MultiStepLR, milestones=[1, 2]), partial(lr_scheduler.MultiStepLR, milestones=[5])
    ),
    "ReduceLROnPlateau": Rescheduled(PLATEAU, PLATEAU),
    "OneCycle of DeepSpeed": Rescheduled(CYCLE, CYCLE),
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
    if dist.get_rank() == 0:
        for path in folder.glob("*/*model_states.pt"):
            saved = torch.load(path, weights_only=False)
            change(saved)
            torch.save(saved, path)
    dist.barrier()


def clear_missing(module: torch.nn.Module, keys: Any) -> None:
    keys.missing_keys.clear()


def add_observer(model: torch.nn.Module, numel: int) -> None:
    model.observer = PerChannelMinMaxObserver()
    model.observer(torch.ones(numel, 3))


def lacks_a_name(engines: Engines) -> list[str]:
    """Load a checkpoint without the buffer ``late``, in models with a hook that accepts that."""
    engines.stock.save_checkpoint(str(engines.folder))
    with changed_models(engines) as models:
        for model in models:
            model.register_buffer("late", torch.zeros(2))
            model.register_load_state_dict_post_hook(clear_missing)
        return engines.problems_of_loading()


def resizes_a_buffer(engines: Engines) -> list[str]:
    with changed_models(engines) as models:
        for model in models:
            add_observer(model, 4)
        engines.stock.save_checkpoint(str(engines.folder))
        for model in models:
            add_observer(model, 6)
        found = engines.problems_of_loading()
        sizes = [model.observer.min_val.numel() for model in models]
        return found if sizes == [4, 4] else [*found, f"elements of the buffer: {sizes}"]


def had_a_persistent_buffer(engines: Engines) -> list[str]:
    """Load a checkpoint with a buffer that the models no longer load, and that has another shape there."""
    with changed_models(engines) as models:
        models[0].register_buffer("positions", torch.zeros(2))
        engines.stock.save_checkpoint(str(engines.folder))
        for model in models:
            model.register_buffer("positions", torch.zeros(3), persistent=False)
        return engines.problems_of_loading(load_module_strict=False)


@contextmanager
def changed_models(engines: Engines) -> Iterator[list[torch.nn.Module]]:
    """Yield both models, and restore their attributes and classes when the context ends."""
    models = [engines.stock.module, engines.ours.module]
    names = (
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    before = [(type(model), {name: copy.copy(vars(model)[name]) for name in names}) for model in models]
    try:
        yield models
    finally:
        for model, (kind, attributes) in zip(models, before, strict=True):
            model.__class__ = kind
            vars(model).update(attributes)


def excludes_frozen_parameters(engines: Engines) -> list[str]:
    engines.stock.save_checkpoint(str(engines.folder), exclude_frozen_parameters=True)
    message = refusal(lambda: engines.ours.load_checkpoint(str(engines.folder)))
    found = engines.problems_of_loading(load_module_strict=False)
    return found if "load_module_strict=False" in message else [*found, f"the remedy is missing: {message}"]


def passes_other_arguments(engines: Engines) -> list[str]:
    """Check calls with arguments that another package adds or has in place of DeepSpeed's."""
    engines.stock.save_checkpoint(str(engines.folder))

    def check(**kwargs: Any) -> None:
        check_before_loading(engines.ours, (str(engines.folder),), kwargs)

    found = [refusal(check), refusal(lambda: check(tag=f"global_step{STEPS}", of_another_package=1))]
    missing = refusal(lambda: check(tag="nowhere"))
    # Nothing is known about the folder here: the other package decides.
    check_before_loading(engines.ours, (), {"folder": str(engines.folder)})
    return [*filter(None, found), *([] if "nowhere" in missing else ["the check has no effect"])]


def has_a_changed_value(pattern: str, change: Callable[[dict[str, Any]], None], engines: Engines) -> list[str]:
    """Change a value in a file of rank 0, with which stock's load or update fails."""
    engines.stock.save_checkpoint(str(engines.folder))
    if dist.get_rank() == 0:
        (path,) = engines.folder.glob(f"*/*zero_pp_rank_0_*{pattern}")
        saved = torch.load(path, weights_only=False)
        change(saved)
        torch.save(saved, path)
    dist.barrier()
    before = Loaded.from_engine(engines.ours)
    message = refusal(lambda: engines.ours.load_checkpoint(str(engines.folder)))
    return [*three_parts_missing(message), *before.differences(Loaded.from_engine(engines.ours))]


def miscount_ranks(saved: dict[str, Any]) -> None:
    saved["mp_world_size"] = 2


def states_of(saved: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the states of the inner optimizer by sub-group."""
    states: dict[int, dict[str, Any]] = saved[OPTIMIZER_STATE_DICT][OPTIMIZER_STATE_DICT]["state"]
    return states


def empty_a_count(saved: dict[str, Any]) -> None:
    states_of(saved)[0]["step"] = None


def forget_a_moment(saved: dict[str, Any]) -> None:
    del states_of(saved)[0]["exp_avg_sq"]


def refusal(action: Callable[[], object]) -> str:
    """Return the message with which ``action`` is refused, or "" if it is not."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


JOBS: dict[str, Callable[[Engines], list[str]]] = {
    **{name: partial(loads_scheduler, schedulers) for name, schedulers in SCHEDULERS.items()},
    "a hook clears missing names": lacks_a_name,
    "an overridden load of a buffer": resizes_a_buffer,
    "a buffer that is no longer persistent": had_a_persistent_buffer,
    "no frozen parameters": excludes_frozen_parameters,
    "a load with other arguments": passes_other_arguments,
    "another number of model-parallel ranks": partial(has_a_changed_value, "model_states.pt", miscount_ranks),
    "moments with an empty number of steps": partial(has_a_changed_value, "optim_states.pt", empty_a_count),
    "one moment of two": partial(has_a_changed_value, "optim_states.pt", forget_a_moment),
}


@contextmanager
def both_engines(folder: Path) -> Iterator[tuple[Any, Any]]:
    case = Case(name="accepted", blocks=(STRIDE_2,), world_size=dist.get_world_size(), steps=STEPS, frozen=True)
    with closing_engine(case, None) as stock, closing_engine(case, STRIDE_2) as ours:
        for engine in (stock, ours):
            train(engine, case, folder)
        yield stock, ours


@once
def problems() -> dict[str, list[str]]:
    """Return the problems of each job, for which two engines are made once."""
    found: dict[str, list[str]] = on_ranks(2, problems_of_jobs)[0]
    return found


def problems_of_jobs() -> dict[str, list[str]]:
    with shared_folder() as folder, both_engines(folder) as (stock, ours):
        by_name = {name: everywhere(partial(job, Engines(stock, ours, folder / name))) for name, job in JOBS.items()}
    return {name: [problem for rank in found for problem in rank] for name, found in by_name.items()}


@pytest.mark.xdist_group("accepted checkpoints")
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.P4
def test_a_checkpoint_is_understood_before_it_is_loaded(job: str) -> None:
    assert problems()[job] == []


def scheduler_of(kind: str) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return {
        "LambdaLR": LAMBDA,
        "ChainedScheduler": chained,
        "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, cycle_momentum=False),
        "ReduceLROnPlateau": PLATEAU,
    }[kind](optimizer)


@pytest.mark.parametrize(
    ("kind", "saved", "loads"),
    [
        ("LambdaLR", None, False),
        ("LambdaLR", {}, False),
        ("LambdaLR", {"lr_lambdas": [None, {}]}, False),
        ("LambdaLR", {"lr_lambdas": [3]}, False),
        ("LambdaLR", {"lr_lambdas": []}, True),
        ("LambdaLR", {"lr_lambdas": [{"factor": 2}], "another": "entry"}, True),
        ("ChainedScheduler", {"_schedulers": None}, False),
        ("ChainedScheduler", {"_schedulers": [{}] * 3}, False),
        ("CyclicLR", {"mode": "triangular"}, False),
        ("CyclicLR", {"_scale_fn_custom": {"gamma": 1.0}}, False),
        ("ReduceLROnPlateau", {"mode": "text"}, False),
        ("ReduceLROnPlateau", {}, True),
    ],
)
def test_the_state_of_a_scheduler_is_refused_only_if_pytorch_cannot_load_it(kind: str, saved: Any, loads: bool) -> None:
    scheduler = scheduler_of(kind)
    problem = problem_of_scheduler(scheduler, saved)
    errors = (AttributeError, IndexError, KeyError, TypeError, ValueError)
    with nullcontext() if loads else pytest.raises(errors):
        scheduler.load_state_dict(saved)
    assert problem is None if loads else " must " in str(problem)


class OwnScheduler:
    """A scheduler of a user, which decides itself how its state is saved."""

    def state_dict(self) -> Any:
        return [3]

    def load_state_dict(self, state: Any) -> None:
        (self.steps,) = state


@pytest.mark.parametrize("scheduler", [OwnScheduler(), scheduler_of("ReduceLROnPlateau")])
def test_the_state_of_any_scheduler_is_accepted_by_itself(scheduler: Any) -> None:
    assert problem_of_scheduler(scheduler, scheduler.state_dict()) is None


def with_own_load() -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    module._load_from_state_dict = lambda *arguments: None
    return module


def with_hook(register: str) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    getattr(module, register)(lambda *arguments: None)
    return module


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.InstanceNorm1d(1), torch.nn.LSTM(1, 1)), False),
        (PerChannelMinMaxObserver(), True),
        (with_own_load(), True),
        (with_hook("register_load_state_dict_pre_hook"), True),
        (with_hook("register_load_state_dict_post_hook"), True),
    ],
)
def test_a_module_that_overrides_how_it_loads_is_known(module: torch.nn.Module, expected: bool) -> None:
    assert has_custom_loading(torch.nn.Sequential(torch.nn.Sequential(module))) == expected


class Textless(Exception):
    """An object whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError

    __repr__ = __str__


@pytest.mark.parametrize("value", [Textless(), [Textless()]])
def test_an_object_without_text_is_described_by_its_type(value: object) -> None:
    assert shown(value) == f"an object of type {type(value).__name__} whose text raises KeyError"
