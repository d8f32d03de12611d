"""Run scenarios in which a script assigns, clears or deletes optimizer states, or creates a second engine."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state, safe_get_local_optimizer_state

from tests.kernels.intercepted import before_each_update
from tests.zero.behaviour.behaviour_variant import (
    FP16,
    BehaviourNet,
    BehaviourVariant,
    Seen,
    counters,
    final_states,
    inputs,
    loss_of,
    moments,
    params,
    raised,
    train,
)
from tests.zero.parity.training import shared_folder

BLOCKS: tuple[dict[str, Any], ...] = (
    {"placement": "cpu"},
    {"placement": "stride", "update_stride": 2},
    {"placement": "streamed", "num_slots": 1},
    {"placement": [{"match": "*", "states": "resident"}]},
    {"placement": "streamed", "overlap_forward": False},
    {"placement": "cpu", "eager": True},
)
"""One for each placement, one in which updates end inside ``step()``, and one in which they start in backward."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def states(engine: Any) -> list[dict[str, Any]]:
    """Return the state of each sub-group."""
    return [engine.optimizer.state[master] for master in engine.optimizer.fp32_partitioned_groups_flat]


def filled(like: torch.Tensor, value: float) -> torch.Tensor:
    """Return a tensor that is different on each rank and in each sub-group, and never negative."""
    return torch.linspace(value, 2 * value + 0.01 * dist.get_rank(), like.numel())


# Assign to states. Each function receives the engine and yields the tensors that the script keeps.

Kept = Iterator[torch.Tensor]


def moments_of_zeros(engine: Any) -> Kept:
    """Reset the moments as ReLoRA does."""
    for state in states(engine):
        for key in MOMENTS:
            state[key] = torch.zeros_like(state[key])
            yield state[key]


def some_moments(engine: Any) -> Kept:
    for index, state in enumerate(states(engine)[::2]):
        state["exp_avg_sq"] = filled(state["exp_avg_sq"], 0.01 * (index + 1))
        yield state["exp_avg_sq"]


def moments_by_data(engine: Any) -> Kept:
    for state in states(engine)[1:]:
        state["exp_avg"].data = filled(state["exp_avg"], 0.02)
        yield state["exp_avg"]


def masters_by_data(engine: Any) -> Kept:
    for master in engine.optimizer.fp32_partitioned_groups_flat[1:]:
        master.data = master.data * 0.5
        yield master


def exchanged_moments(engine: Any) -> Kept:
    """Exchange the moments of sub-groups that are of equal size."""
    by_numel: dict[int, dict[str, Any]] = {}
    exchanged = 0
    for state in states(engine):
        other = by_numel.setdefault(state["exp_avg"].numel(), state)
        if other is not state:
            other["exp_avg"], state["exp_avg"] = state["exp_avg"], other["exp_avg"]
            exchanged += 1
    assert exchanged
    yield from (state["exp_avg"] for state in states(engine))


def masters_of_new_tensors(engine: Any) -> Kept:
    """Replace a master by another tensor: one with the states of the old tensor, and one without states."""
    listed, by_master = engine.optimizer.fp32_partitioned_groups_flat, engine.optimizer.state
    for index in (0, 2):
        old = listed[index]
        new = old.detach().clone().mul_(0.75).requires_grad_()
        # Stock sums gradients there; the plugin has them elsewhere.
        new.grad = old.grad
        state = by_master.pop(old)
        if index == 0:
            by_master[new] = state
        listed[index] = new
        yield new


def cleared_state(engine: Any) -> Kept:
    engine.optimizer.state.clear()
    yield from ()


def deleted_and_emptied_states(engine: Any) -> Kept:
    masters = engine.optimizer.fp32_partitioned_groups_flat
    del engine.optimizer.state[masters[0]]
    engine.optimizer.state[masters[1]].clear()
    engine.optimizer.state[masters[2]] = {}
    yield from ()


def moved_moments(engine: Any) -> Kept:
    """Move the moments of one sub-group to another, and clear the first."""
    groups = states(engine)
    numels = [state["exp_avg"].numel() for state in groups]
    first = next(index for index, numel in enumerate(numels) if numels.count(numel) > 1)
    second = numels.index(numels[first], first + 1)
    for key in MOMENTS:
        groups[second][key] = groups[first][key]
    groups[first].clear()
    yield from (groups[second][key] for key in MOMENTS)


def numbers_of_steps(engine: Any) -> Kept:
    values = (0, 7, np.int64(3), torch.tensor(2), torch.tensor(5.0), True, np.float32(4))
    for state, step in zip(states(engine), (value for _ in range(9) for value in values), strict=False):
        state["step"] = step
    yield from ()


def replaced_dictionaries(engine: Any) -> Kept:
    """Replace the whole dictionary of states, as a script does that restores its own checkpoint."""
    by_master = engine.optimizer.state
    new = type(by_master)(dict)
    for master, state in by_master.items():
        new[master] = {"step": 1, **{key: state[key].clone().mul_(0.5) for key in MOMENTS}, "of the script": 3}
    engine.optimizer.state = new
    yield from (state[key] for state in new.values() for key in MOMENTS)


ASSIGNMENTS: tuple[Callable[[Any], Kept], ...] = (
    moments_of_zeros,
    some_moments,
    moments_by_data,
    masters_by_data,
    exchanged_moments,
    masters_of_new_tensors,
    cleared_state,
    deleted_and_emptied_states,
    moved_moments,
    numbers_of_steps,
    replaced_dictionaries,
)


def assigned_states(variant: BehaviourVariant) -> Seen:
    """Assign to states between two steps, and between backward and the step, in every placement."""
    yield from variant.in_each(BLOCKS, assigned_in_turn)


def assigned_in_turn(variant: BehaviourVariant, _: int) -> Seen:
    torch.manual_seed(3)
    # Several sub-groups are of equal size, with one rank and with two.
    engine = variant.engine(BehaviourNet(), zero_optimization={"sub_group_size": 90})
    yield from train(engine, 2)
    for index, assign in enumerate(ASSIGNMENTS):
        step = 3 * index
        kept: list[torch.Tensor] = []
        if index % 2:
            engine.backward(loss_of(engine(inputs(step))))
            kept.extend(assign(engine))
            engine.step()
        else:
            kept.extend(assign(engine))
        yield from train(engine, 1, first=step + 1)
        yield f"keys after {assign.__name__}", [sorted(state) for state in states(engine)]
        yield f"steps after {assign.__name__}", [state["step"] for state in states(engine)]
        yield from moments(engine)
        # The update writes to the tensors that the script has kept.
        yield from (("kept", tensor.detach().clone()) for tensor in kept)
        yield from train(engine, 1, first=step + 2)
    yield from final_states(engine)


def states_assigned_before_a_skipped_step(variant: BehaviourVariant) -> Seen:
    """Skip the step after states were cleared: stock starts from zeros in the step after that."""
    engine = variant.engine(BehaviourNet(), **FP16)
    yield from train(engine, 2, torch.float16)
    engine.optimizer.state[engine.optimizer.fp32_partitioned_groups_flat[0]].clear()
    states(engine)[1]["exp_avg"] = filled(states(engine)[1]["exp_avg"], 0.1)
    engine.backward(loss_of(engine(inputs(2, torch.float16))) * float("inf"))
    engine.step()
    yield from counters(engine)
    yield "keys", [sorted(state) for state in states(engine)]
    yield "assigned", states(engine)[1]["exp_avg"].clone()
    yield from train(engine, 2, torch.float16, first=3)
    yield from final_states(engine)


def saved_states_that_were_assigned(variant: BehaviourVariant) -> Seen:
    """Save before and after the update that uses assigned and cleared states, and load both checkpoints."""
    engine = variant.engine(BehaviourNet())
    yield from train(engine, 2)
    with shared_folder() as folder:
        masters = engine.optimizer.fp32_partitioned_groups_flat
        engine.optimizer.state[masters[0]].clear()
        states(engine)[1]["exp_avg"] = filled(states(engine)[1]["exp_avg"], 0.1)
        param = engine.optimizer.fp16_groups[1][0]
        yield "read before the update", safe_get_full_optimizer_state(param, "exp_avg").clone()
        cleared = engine.optimizer.fp16_groups[0][0]
        yield "cleared", raised(lambda: safe_get_local_optimizer_state(cleared, "exp_avg"))
        engine.save_checkpoint(str(folder), tag="before")
        yield from saved(folder, "before")
        yield from train(engine, 1, first=2)
        engine.save_checkpoint(str(folder), tag="after")
        yield from saved(folder, "after")
        for tag in ("before", "after"):
            engine.load_checkpoint(str(folder), tag=tag)
            yield from train(engine, 2, first=3)
            yield from final_states(engine)


def saved(folder: Path, tag: str) -> Seen:
    """Yield the states in this rank's file."""
    (path,) = folder.glob(f"{tag}/*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
    file = torch.load(path, weights_only=False)["optimizer_state_dict"]
    yield "saved masters", [master.tolist() for master in file["fp32_flat_groups"]]
    for index, state in sorted(file["optimizer_state_dict"]["state"].items()):
        yield f"saved keys of {index}", sorted(state)
        yield f"saved state of {index}", {key: np.asarray(value).tolist() for key, value in sorted(state.items())}


# A second engine on the module of the first


def slow_updates(variant: BehaviourVariant) -> AbstractContextManager[object]:
    """Let the plugin's updates last longer than an engine takes to read the parameters that it is created for."""

    def sleep(_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)

    return before_each_update(sleep) if variant.optimizers else nullcontext()


def second_engines(variant: BehaviourVariant) -> Seen:
    """Create engines on modules whose last update is in flight: for training, and without an optimizer."""
    yield from variant.in_each(BLOCKS[:4], second_engine)
    yield from engine_for_inference(variant)


def second_engine(variant: BehaviourVariant, index: int) -> Seen:
    torch.manual_seed(4)
    first = variant.engine(BehaviourNet())
    module = first.module
    with slow_updates(variant):
        yield from train(first, 2)
        if index % 2:
            # DeepSpeed's hooks on the module keep the engine.
            variant.forget(first)
            del first
            gc.collect()
        second = variant.engine(module)
        yield "masters", [master.tolist() for master in second.optimizer.fp32_partitioned_groups_flat]
    yield from train(second, 2, first=2)
    yield from params(second)
    yield from final_states(second)


def engine_for_inference(variant: BehaviourVariant) -> Seen:
    torch.manual_seed(4)
    first = variant.engine(BehaviourNet())
    with slow_updates(variant):
        yield from train(first, 2)
        evaluating, *_ = deepspeed.initialize(model=first.module, config=variant.config(optimizer=None))
        with torch.no_grad():
            yield "evaluated", evaluating(inputs(9)).clone()


SCENARIOS = (assigned_states, states_assigned_before_a_skipped_step, saved_states_that_were_assigned, second_engines)
