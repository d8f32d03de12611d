"""Run scenarios that read, write, assign or move parameters and states, and scenarios with several engines."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.runtime.zero import unwrap_model_for_generation
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices

from tests.zero.behaviour.behaviour_variant import (
    BLOCK,
    BY_DTYPE,
    FP16,
    READING_S,
    BehaviourNet,
    BehaviourVariant,
    Seen,
    counters,
    gradients,
    in_each,
    inputs,
    loss_of,
    moments,
    params,
    raised,
    slow_updates,
    train,
)
from tests.zero.parity.case import CPU, RESIDENT, STREAMED, STREAMED_ONE_SLOT, eager, not_deferred
from tests.zero.parity.training import shared_folder

BLOCKS = (CPU, BLOCK, STREAMED_ONE_SLOT, RESIDENT, not_deferred(STREAMED), eager(CPU))
"""One for each placement, one in which updates end inside ``step()``, and one in which they start in backward."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Kept = Iterator[torch.Tensor]


@in_each({**BLOCK, "unit_size": 80})
def fragments(variant: BehaviourVariant) -> Seen:
    for dtype, changes in BY_DTYPE.items():
        model = BehaviourNet()
        model.layers[1].requires_grad_(False)
        engine = variant.engine(model, **changes)
        all_params = list(model.parameters())
        for step in range(4):
            engine.backward(loss_of(engine(inputs(step, dtype))))
            yield from gradients(engine)
            yield from params(engine)
            for param in all_params:
                yield "has a master", utils.safe_get_local_fp32_param(param) is not None
                yield "has a gradient", utils.safe_get_local_grad(param) is not None
                value = torch.linspace(-0.1, 0.1 + step, param.ds_numel).view(param.ds_shape)
                if step == 1:
                    utils.safe_set_full_fp32_param(param, value)
                    utils.safe_set_full_grad(param, value.to(dtype))
            if step > 1:
                utils.safe_update_full_grad_vectorized(all_params, lambda grad, param: grad * 0.5)
            if step == 3:
                for grads in engine.optimizer.get_fp32_grad_partitions().values():
                    for grad in grads.values():
                        yield "partition on", str(grad.device)
                        grad.mul_(0.5)
            yield from gradients(engine)
            engine.step()
            for param in all_params:
                value = torch.linspace(0.0, 0.1, param.ds_numel).view(param.ds_shape)
                part = torch.linspace(0.0, 0.1, param.ds_tensor.numel())
                if step == 0:
                    utils.safe_set_full_optimizer_state(param, value, "exp_avg")
                    utils.safe_set_full_fp32_param(param, value)
                elif step == 1:
                    utils.safe_set_local_optimizer_state(param, part, "exp_avg_sq")
                    utils.safe_set_local_fp32_param(param, part)
            yield from everything(engine)
            yield from counters(engine)


def everything(engine: Any) -> Seen:
    yield from gradients(engine)
    yield from params(engine)
    yield from moments(engine)


@in_each({}, STREAMED)
def moments_in_the_dtype_of_the_masters(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=3)
    yield from train(engine, 3)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        engine.backward(loss_of(engine(inputs(7, torch.bfloat16))))
        engine.step()
        engine.load_checkpoint(str(folder))
    yield from train(engine, 3, first=3)
    assigned = variant.engine(BehaviourNet())
    yield from train(assigned, 2)
    for master in assigned.optimizer.fp32_partitioned_groups_flat:
        state = assigned.optimizer.state[master]
        state.update({key: state[key].to(master.dtype) for key in ("exp_avg", "exp_avg_sq")})
    yield from train(assigned, 2, first=3)


def states_that_move(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=2)
    yield from train(engine, 4)
    for index, include in enumerate((None, *([state] for state in OffloadStateTypeEnum))):
        engine.offload_states(include=include, pin_memory=index % 2 == 1, non_blocking=index % 3 == 0)
        for state in OffloadStateTypeEnum:
            yield f"{state} while offloaded", sorted(map(str, get_state_devices(engine, state)))
        engine.reload_states(non_blocking=index % 3 == 0)
        for state in OffloadStateTypeEnum:
            yield f"{state} reloaded", sorted(map(str, get_state_devices(engine, state)))
        yield from params(engine)
        yield from moments(engine)
        yield from train(engine, 2)
    kept = variant.engine(BehaviourNet(), zero_optimization={"offload_param": {"device": "cpu"}})
    yield "with offload_param", raised(kept.offload_states)
    yield "to NVMe", raised(lambda: engine.offload_states(device="nvme"))


def partitions_that_the_caller_replaces(variant: BehaviourVariant) -> Seen:
    """Assign new memory to partitions: forward uses it until the next step, and the updated parameters afterwards."""
    engine = variant.engine(BehaviourNet(), zero_optimization={"stage3_param_persistence_threshold": 0})
    for step in range(4):
        if step in (0, 2):
            for param in engine.module.parameters():
                param.ds_tensor.data = torch.full_like(param.ds_tensor, 0.01 * (step + 1))
        yield from params(engine)
        yield from train(engine, 2, first=2 * step)
        yield from params(engine)


@in_each(CPU, STREAMED)
def parameters_in_place(variant: BehaviourVariant) -> Seen:
    """Read and write parameters right after the step: stock computes with the changed ones until the next update."""
    # On one rank, a persistent parameter is the same memory that the update writes.
    for threshold in (10**9, 20):
        engine = variant.engine(BehaviourNet(), zero_optimization={"stage3_param_persistence_threshold": threshold})
        with slow_updates(variant):
            for step in range(4):
                yield from train(engine, 1, first=step)
                yield from (("in place", param.data.clone()) for param in engine.module.parameters())
                for param in list(engine.module.parameters())[step % 2 :: 2]:
                    param.data.mul_(1.5).add_(0.01)


@in_each(CPU, RESIDENT)
def reads_during_an_update(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), zero_optimization={"stage3_param_persistence_threshold": 0})
    with slow_updates(variant, READING_S):
        for step in range(3):
            yield from train(engine, 2, first=3 * step)
            yield from all_gathered(engine)
            yield from train(engine, 1, first=3 * step + 2)
            yield from moments(engine)


def all_gathered(engine: Any) -> Seen:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        yield from (("gathered", param.data.clone()) for param in engine.module.parameters())


def generation(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), zero_optimization={"offload_param": {"device": "cpu"}})
    for step in range(4):
        yield from train(engine, 1, first=step)
        with unwrap_model_for_generation(engine) as model, torch.no_grad():
            yield "generated", model(inputs(9)).clone()
        yield "hooks", len(engine.optimizer.parameter_offload.forward_hooks)
        engine.eval()
        with torch.no_grad():
            yield "evaluated", engine(inputs(8)).clone()
        engine.train()
        engine.empty_partition_cache()


def states(engine: Any) -> list[dict[str, Any]]:
    return [engine.optimizer.state[master] for master in engine.optimizer.fp32_partitioned_groups_flat]


def filled(like: torch.Tensor, value: float) -> torch.Tensor:
    """Return a tensor that is different on each rank and in each sub-group, and never negative."""
    return torch.linspace(value, 2 * value + 0.01 * dist.get_rank(), like.numel())


def moments_of_zeros(engine: Any) -> Kept:
    for state in states(engine):
        for key in MOMENTS:
            state[key] = torch.zeros_like(state[key])
            yield state[key]


def moments_and_masters_by_data(engine: Any) -> Kept:
    for master in engine.optimizer.fp32_partitioned_groups_flat[1:]:
        exp_avg = engine.optimizer.state[master]["exp_avg"]
        exp_avg.data = filled(exp_avg, 0.02)
        master.data = master.data * 0.5
        yield from (exp_avg, master)


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


def deleted_and_emptied_states(engine: Any) -> Kept:
    masters = engine.optimizer.fp32_partitioned_groups_flat
    del engine.optimizer.state[masters[0]]
    engine.optimizer.state[masters[1]].clear()
    engine.optimizer.state[masters[2]] = {}
    yield from ()


def numbers_of_steps(engine: Any) -> Kept:
    values = (0, 7, np.int64(3), torch.tensor(2), torch.tensor(5.0), True, np.float32(4))
    for state, step in zip(states(engine), cycle(values), strict=False):
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
    moments_and_masters_by_data,
    masters_of_new_tensors,
    deleted_and_emptied_states,
    numbers_of_steps,
    replaced_dictionaries,
)


@in_each(*BLOCKS)
def assigned_states(variant: BehaviourVariant) -> Seen:
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


def states_assigned_before_a_skipped_step(variant: BehaviourVariant) -> Seen:
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


def saved_states_that_were_assigned(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet())
    yield from train(engine, 2)
    with shared_folder() as folder:
        masters = engine.optimizer.fp32_partitioned_groups_flat
        engine.optimizer.state[masters[0]].clear()
        states(engine)[1]["exp_avg"] = filled(states(engine)[1]["exp_avg"], 0.1)
        param = engine.optimizer.fp16_groups[1][0]
        yield "read before the update", utils.safe_get_full_optimizer_state(param, "exp_avg").clone()
        cleared = engine.optimizer.fp16_groups[0][0]
        yield "cleared", raised(lambda: utils.safe_get_local_optimizer_state(cleared, "exp_avg"))
        engine.save_checkpoint(str(folder), tag="before")
        yield from saved(folder, "before")
        yield from train(engine, 1, first=2)
        engine.save_checkpoint(str(folder), tag="after")
        yield from saved(folder, "after")
        for tag in ("before", "after"):
            engine.load_checkpoint(str(folder), tag=tag)
            yield from train(engine, 2, first=3)


def saved(folder: Path, tag: str) -> Seen:
    (path,) = folder.glob(f"{tag}/*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
    file = torch.load(path, weights_only=False)["optimizer_state_dict"]
    yield "saved masters", [master.tolist() for master in file["fp32_flat_groups"]]
    for index, state in sorted(file["optimizer_state_dict"]["state"].items()):
        yield f"saved keys of {index}", sorted(state)
        yield f"saved state of {index}", {key: torch.as_tensor(value).tolist() for key, value in sorted(state.items())}


@in_each(CPU, RESIDENT)
def second_engines(variant: BehaviourVariant) -> Seen:
    first = variant.engine(BehaviourNet())
    module = first.module
    with slow_updates(variant, READING_S):
        yield from train(first, 2)
        variant.engines.remove(first)
        if variant.block == RESIDENT:
            # DeepSpeed's hooks on the module keep the engine.
            del first
            gc.collect()
        second = variant.engine(module)
        yield "masters", [master.tolist() for master in second.optimizer.fp32_partitioned_groups_flat]
    yield from train(second, 2, first=2)
    yield from params(second)


def an_engine_without_an_optimizer(variant: BehaviourVariant) -> Seen:
    first = variant.engine(BehaviourNet())
    with slow_updates(variant, READING_S):
        yield from train(first, 2)
        variant.engines.remove(first)
        evaluating, *_ = deepspeed.initialize(model=first.module, config=variant.config(optimizer=None))
        with torch.no_grad():
            yield "evaluated", evaluating(inputs(9)).clone()
