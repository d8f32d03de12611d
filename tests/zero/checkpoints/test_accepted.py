"""Check that no valid checkpoint is refused before it is loaded, and that no rank waits for one that cannot check.

Most checkpoints are valid, though unlike the engine that loads them. Stock saves them. Stock and the plugin load each,
and must then have the same states: a checkpoint that stock can load must not be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.optim import lr_scheduler

from deep_opt_states.zero.checkpoint_check import CheckpointError, check_before_loading, shown
from deep_opt_states.zero.internals.lr_schedulers import problem_of_scheduler
from tests.ranks import ranks
from tests.zero.checkpoints.test_malformed import Loaded
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import closing_engine, shared_folder, train

STEPS = 3


@dataclass(frozen=True)
class Engines:
    stock: Any
    ours: Any
    folder: Path

    def load(self, **options: Any) -> None:
        for engine in (self.stock, self.ours):
            engine.load_checkpoint(str(self.folder), **options)
        assert Loaded.from_engine(self.stock).differences(Loaded.from_engine(self.ours)) == []


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    of_lambda = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return lr_scheduler.ChainedScheduler([lr_scheduler.MultiStepLR(optimizer, [1, 4]), of_lambda], optimizer)


LAMBDA = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step)

SCHEDULERS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (sequential, {}, ""),
    (chained, {}, ""),
    # Another release does not save this key.
    (LAMBDA, {}, "_is_initial"),
    (partial(lr_scheduler.MultiStepLR, milestones=[1, 2]), {"milestones": [5]}, ""),
    (partial(lr_schedules.OneCycle, cycle_min_lr=0.1, cycle_max_lr=0.2), {}, ""),
]
"""LR schedulers before the save, their changes after it, and a key that the checkpoint lacks."""


def reschedule(engine: Any, make: Callable[..., Any]) -> None:
    engine.lr_scheduler = make(engine.basic_optimizer)
    for _ in range(STEPS):
        engine.lr_scheduler.step()


def loads_scheduler(make: Callable[..., Any], changes: dict[str, Any], lacks: str, engines: Engines) -> None:
    before = engines.stock.lr_scheduler
    reschedule(engines.stock, make)
    engines.stock.save_checkpoint(str(engines.folder))
    for path in engines.folder.glob("*/*model_states.pt") if lacks and dist.get_rank() == 0 else ():
        saved = torch.load(path, weights_only=False)
        del saved["lr_scheduler"][lacks]
        torch.save(saved, path)
    dist.barrier()
    for engine in (engines.stock, engines.ours):
        reschedule(engine, partial(make, **changes))
    engines.load()
    engines.stock.lr_scheduler = engines.ours.lr_scheduler = before


def add_observer(model: torch.nn.Module, numel: int) -> None:
    model.observer = PerChannelMinMaxObserver()
    model.observer(torch.ones(numel, 3))


def lacks_a_name(engines: Engines) -> None:
    """Load a checkpoint without the buffer ``late``, in models with a hook that accepts that, or that adds it."""
    engines.stock.save_checkpoint(str(engines.folder))
    for register, hook in (
        ("register_load_state_dict_post_hook", lambda _, keys: keys.missing_keys.clear()),
        ("register_load_state_dict_pre_hook", lambda _, state, *__: state.setdefault("late", torch.ones(2))),
    ):
        with changed_models(engines) as models:
            for model in models:
                model.register_buffer("late", torch.zeros(2))
                getattr(model, register)(hook)
            engines.load()


def resizes_a_buffer(engines: Engines) -> None:
    with changed_models(engines) as models:
        for model in models:
            add_observer(model, 4)
        engines.stock.save_checkpoint(str(engines.folder))
        for model in models:
            add_observer(model, 6)
        engines.load()
        assert [model.observer.min_val.numel() for model in models] == [4, 4]


def had_a_persistent_buffer(engines: Engines) -> None:
    """Load a checkpoint with a buffer that the models no longer load, and that has another shape there."""
    with changed_models(engines) as models:
        models[0].register_buffer("positions", torch.zeros(2))
        engines.stock.save_checkpoint(str(engines.folder))
        for model in models:
            model.register_buffer("positions", torch.zeros(3), persistent=False)
        engines.load(load_module_strict=False)


@contextmanager
def changed_models(engines: Engines) -> Iterator[list[torch.nn.Module]]:
    models = [engines.stock.module, engines.ours.module]
    with ExitStack() as restored:
        for model in models:
            persistent = set(model._non_persistent_buffers_set)
            restored.enter_context(mock.patch.object(model, "_non_persistent_buffers_set", persistent))
            for name in ("_buffers", "_modules", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
                restored.enter_context(mock.patch.dict(vars(model)[name]))
        yield models


def excludes_frozen_parameters(engines: Engines) -> None:
    engines.stock.save_checkpoint(str(engines.folder), exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match="load_module_strict=False"):
        engines.ours.load_checkpoint(str(engines.folder))
    engines.load(load_module_strict=False)


def passes_other_arguments(engines: Engines) -> None:
    engines.stock.save_checkpoint(str(engines.folder))
    check = partial(check_before_loading, engines.ours, (str(engines.folder),))
    check({})
    check({"tag": f"global_step{STEPS}", "of_another_package": 1})
    with pytest.raises(CheckpointError, match="nowhere"):
        check({"tag": "nowhere"})
    # Nothing is known about the folder here: the other package decides.
    check_before_loading(engines.ours, (), {"folder": str(engines.folder)})


@pytest.mark.P4
@ranks(2)
def test_a_checkpoint_is_understood_before_it_is_loaded() -> None:
    case = Case(name="accepted", blocks=(STRIDE_2,), world_size=2, steps=STEPS, frozen=True)
    jobs = [
        *(partial(loads_scheduler, *scheduler) for scheduler in SCHEDULERS),
        lacks_a_name,
        resizes_a_buffer,
        had_a_persistent_buffer,
        excludes_frozen_parameters,
        passes_other_arguments,
    ]
    with shared_folder() as folder, closing_engine(case, None) as stock, closing_engine(case, STRIDE_2) as ours:
        for engine in (stock, ours):
            train(engine, case, folder)
        for number, job in enumerate(jobs):
            job(Engines(stock, ours, folder / str(number)))


OwnScheduler = mock.Mock(**{"return_value.state_dict.return_value": [3]})
CyclicLR = partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, cycle_momentum=False)


@pytest.mark.parametrize(
    ("make", "saved", "loads"),
    [
        (LAMBDA, None, False),
        (LAMBDA, {}, False),
        (LAMBDA, {"lr_lambdas": [None, {}]}, False),
        (LAMBDA, {"lr_lambdas": [3]}, False),
        (LAMBDA, {"lr_lambdas": [{"factor": 2}], "another": "entry"}, True),
        (chained, {"_schedulers": None}, False),
        (chained, {"_schedulers": [{}] * 3}, False),
        (CyclicLR, {"mode": "triangular"}, False),
        (CyclicLR, {"_scale_fn_custom": {"gamma": 1.0}}, False),
        (lr_scheduler.ReduceLROnPlateau, {"mode": "text"}, False),
        (lr_scheduler.ReduceLROnPlateau, {}, True),
        (OwnScheduler, [3], True),
    ],
)
def test_the_state_of_a_scheduler_is_refused_only_if_pytorch_cannot_load_it(make: Any, saved: Any, loads: bool) -> None:
    scheduler = make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    problem = problem_of_scheduler(scheduler, saved)
    errors = (AttributeError, IndexError, KeyError, TypeError, ValueError)
    with nullcontext() if loads else pytest.raises(errors):
        scheduler.load_state_dict(saved)
    assert problem is None if loads else " must " in str(problem)


def test_an_object_without_text_is_described_by_its_type() -> None:
    textless = mock.MagicMock(__str__=mock.Mock(side_effect=KeyError), __repr__=mock.Mock(side_effect=KeyError))
    for value in (textless, [textless]):
        assert shown(value) == f"an object of type {type(value).__name__} whose text raises KeyError"
