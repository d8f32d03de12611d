"""Run scenarios of ``step()`` apart from Adam: norms, clipping, skipped steps, loss scales, schedulers, optimizers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

from tests.zero.behaviour.behaviour_variant import (
    BY_DTYPE,
    FP16,
    FP32,
    BehaviourNet,
    BehaviourVariant,
    Seen,
    counters,
    final_states,
    inputs,
    loss_of,
    train,
)


def norms_of_groups(engine: Any) -> Seen:
    for index, norm in enumerate(engine.optimizer._get_norm_groups()):
        yield f"norm of sub-group {index}", norm.clone()


def gradients_that_the_caller_clips(variant: BehaviourVariant) -> Seen:
    """Clip gradients as the caller, and read the norms before and after, also after a skipped step."""
    for dtype in (torch.bfloat16, torch.float16):
        engine = variant.engine(BehaviourNet(), gradient_clipping=0.05, **BY_DTYPE[dtype])
        for step in range(4):
            factor = math.inf if step == 1 else 1.0
            engine.backward(factor * loss_of(engine(inputs(step, dtype))))
            yield from norms_of_groups(engine)
            if step > 1:
                for param in engine.module.parameters():
                    safe_set_local_grad(param, safe_get_local_grad(param).clamp(-1e-3, 1e-3))
                yield from norms_of_groups(engine)
            engine.step()
            yield from counters(engine)
        yield from final_states(engine)


def invalid_norms(variant: BehaviourVariant) -> Seen:
    """Make a norm inf or nan, by one gradient on one rank or by the loss: only that step is skipped."""
    for (dtype, changes), bad in zip(BY_DTYPE.items(), (math.nan, math.inf, math.nan), strict=True):
        engine = variant.engine(BehaviourNet(), gradient_clipping=0.5, **changes)
        param = engine.module.layers[1].weight
        for step in range(5):
            loss = loss_of(engine(inputs(step, dtype)))
            engine.backward(loss * bad if step == 3 else loss)
            if step == 1:
                value = torch.zeros_like(param.ds_tensor, dtype=torch.float32)
                value[0] = bad if dist.get_rank() == dist.get_world_size() - 1 else 1.0
                safe_set_local_grad(param, value)
            engine.step()
            yield from counters(engine)
            yield "overflow", bool(engine.optimizer.overflow)
        yield from final_states(engine)


def gradients_that_the_caller_replaces(variant: BehaviourVariant) -> Seen:
    """Replace all gradients in the model's dtype. Stock takes the norm of the gradients that backward computed."""
    for dtype, changes in BY_DTYPE.items():
        engine = variant.engine(BehaviourNet(), gradient_clipping=0.01, **changes)
        for step in range(3):
            engine.backward(loss_of(engine(inputs(step, dtype))))
            for param in engine.module.parameters():
                safe_set_full_grad(param, torch.full(param.ds_shape, 0.1 * (step + 1), dtype=dtype))
            engine.step()
            yield from counters(engine)
        yield from final_states(engine)


def loss_scales(variant: BehaviourVariant) -> Seen:
    """Train with a dynamic loss scale with hysteresis, with a static one, and with one that the caller sets."""
    dynamic = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 4}
    for fp16 in (dynamic, {"enabled": True, "loss_scale": 128}):
        engine = variant.engine(BehaviourNet(), **FP32, fp16=fp16)
        yield from train(engine, 6, torch.float16)
        yield from final_states(engine)
    engine = variant.engine(BehaviourNet(), **FP16)
    engine.optimizer.override_loss_scale(32.0)
    yield from train(engine, 3, torch.float16)
    yield "scale", float(engine.optimizer.loss_scale)
    yield from final_states(engine)


def learning_rates(variant: BehaviourVariant) -> Seen:
    """Set learning rates in every possible way, between steps while an update may be in flight."""
    engine = variant.engine(BehaviourNet())
    yield from train(engine, 2)
    engine.optimizer.set_lr(3e-3)
    yield "optimizer", engine.optimizer.get_lr()
    yield from train(engine, 2)
    for group in engine.optimizer.param_groups:
        group["lr"], group["weight_decay"], group["betas"] = 2e-3, 0.3, (0.7, 0.9)
    yield from train(engine, 2)
    engine.optimizer.optimizer.param_groups[0]["lr"] = 0.0
    yield from train(engine, 2)
    yield "mom", engine.get_mom()
    yield from final_states(engine)


def schedulers(variant: BehaviourVariant) -> Seen:
    """Use DeepSpeed's schedulers from the config, and PyTorch's, made by the caller or by a function."""
    for scheduler in (
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}},
        {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2}},
    ):
        engine = variant.engine(BehaviourNet(2), scheduler=scheduler)
        yield from train(engine, 6)
        yield from final_states(engine)

    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    engine = variant.engine(BehaviourNet(2), {"lr_scheduler": halving}, **FP16)
    yield from train(engine, 5, torch.float16)
    yield from final_states(engine)
    model = BehaviourNet(2)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    engine = variant.engine(model, {"optimizer": optimizer, "lr_scheduler": halving(optimizer)}, optimizer=None)
    yield from train(engine, 5)
    yield from final_states(engine)


def optimizers_that_the_caller_creates(variant: BehaviourVariant) -> Seen:
    """Pass an optimizer with param groups, and a function that creates the optimizer."""
    model = BehaviourNet()
    weights = [param for name, param in model.named_parameters() if "bias" not in name]
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    groups = [{"params": weights, "weight_decay": 0.1, "name": "weights"}, {"params": biases, "lr": 1e-4}]
    engine = variant.engine(model, {"optimizer": DeepSpeedCPUAdam(groups, lr=1e-2, adamw_mode=False)}, optimizer=None)
    yield from train(engine)
    yield "names", [group.get("name") for group in engine.optimizer.param_groups]
    yield from final_states(engine)
    created = {"optimizer": lambda params: DeepSpeedCPUAdam(params, lr=1e-2, bias_correction=False, eps=1e-5)}
    engine = variant.engine(BehaviourNet(), created, optimizer=None)
    yield from train(engine)
    yield from final_states(engine)


def sub_groups_of_every_size(variant: BehaviourVariant) -> Seen:
    """Train with one parameter per sub-group and with DeepSpeed's default; one parameter has a single element."""
    for sub_group_size in (4, 10**9):
        model = BehaviourNet(3)
        model.register_parameter("one", torch.nn.Parameter(torch.ones(1)))
        forward = model.forward
        model.forward = lambda x, model=model, forward=forward: forward(x) * model.one
        engine = variant.engine(
            model,
            gradient_accumulation_steps=2,
            zero_optimization={"sub_group_size": sub_group_size},
        )
        yield "sub-groups", len(engine.optimizer.fp16_groups)
        for step in range(6):
            engine.backward(loss_of(engine(inputs(step))))
            engine.step()
            masters = engine.optimizer.fp32_partitioned_groups_flat
            states = [engine.optimizer.optimizer.state[master].get("step", 0) for master in masters]
            yield "equal", len(set(states)) == 1
            yield from counters(engine)
        yield "step", states
        yield from final_states(engine)


SCENARIOS = (
    gradients_that_the_caller_clips,
    invalid_norms,
    gradients_that_the_caller_replaces,
    loss_scales,
    learning_rates,
    schedulers,
    optimizers_that_the_caller_creates,
    sub_groups_of_every_size,
)
