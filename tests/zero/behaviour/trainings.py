"""Run scenarios that train: backwards, gradients, norms, loss scales, optimizers, sub-groups and experts."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_local_grad, safe_set_local_grad, set_z3_leaf_modules
from torch.nn.functional import gelu, linear
from torch.utils.checkpoint import checkpoint

from tests.zero.behaviour.behaviour_variant import (
    BLOCK,
    BY_DTYPE,
    FP16,
    FP32,
    BehaviourNet,
    BehaviourVariant,
    Seen,
    counters,
    gradients,
    in_each,
    inputs,
    loss_of,
    params,
    raised,
    slow_updates,
    train,
)
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.case import CPU, eager
from tests.zero.parity.training import placements_by_name


def gradients_that_the_caller_changes(variant: BehaviourVariant) -> Seen:
    """Clip gradients as the caller, and make the norm invalid by the loss and by one element of the last rank."""
    for (dtype, changes), bad in zip(BY_DTYPE.items(), (math.nan, math.inf, math.nan), strict=True):
        engine = variant.engine(BehaviourNet(), gradient_clipping=0.05, **changes)
        for step in range(6):
            engine.backward(loss_of(engine(inputs(step, dtype))) * (bad if step == 1 else 1.0))
            yield "norms", torch.stack(engine.optimizer._get_norm_groups())
            if step > 1:
                for param in engine.module.parameters():
                    gradient = safe_get_local_grad(param).clamp(-1e-3, 1e-3)
                    if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                        gradient[0] = bad
                    safe_set_local_grad(param, gradient)
                yield "norms", torch.stack(engine.optimizer._get_norm_groups())
            engine.step()
            yield from counters(engine)
            yield "overflow", bool(engine.optimizer.overflow)


def loss_scales(variant: BehaviourVariant) -> Seen:
    dynamic = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 4}
    for fp16 in (dynamic, {"enabled": True, "loss_scale": 128}):
        engine = variant.engine(BehaviourNet(), **FP32, fp16=fp16)
        yield from train(engine, 6, torch.float16)
    engine = variant.engine(BehaviourNet(), **FP16)
    engine.optimizer.override_loss_scale(32.0)
    yield from train(engine, 3, torch.float16)


@in_each(BLOCK, CPU)
def learning_rates(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet())
    with slow_updates(variant):
        yield from train(engine, 2)
        engine.optimizer.set_lr(3e-3)
        yield "optimizer", engine.optimizer.get_lr()
        yield from train(engine, 2)
        for group in engine.optimizer.param_groups:
            group.update(lr=2e-1, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-3)
        yield from train(engine, 2)
        engine.optimizer.optimizer.param_groups[0]["lr"] = 0.0
        yield from train(engine, 2)
    yield "mom", engine.get_mom()


def optimizers_and_schedulers(variant: BehaviourVariant) -> Seen:
    """Use the config's, those that the caller creates, with param groups, and functions that create them."""

    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    engine = variant.engine(BehaviourNet(2), {"lr_scheduler": halving}, **FP16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield from train(engine, 5, torch.float16)
    yield "warnings", [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    model = BehaviourNet()
    weights, biases = ([layer.weight for layer in model.layers], [layer.bias for layer in model.layers])
    groups = [{"params": weights, "weight_decay": 0.1, "name": "weights"}, {"params": biases, "lr": 1e-4}]
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-2, adamw_mode=False)
    engine = variant.engine(model, {"optimizer": optimizer, "lr_scheduler": halving(optimizer)}, optimizer=None)
    yield from train(engine)
    yield "names", [group.get("name") for group in engine.optimizer.param_groups]
    created = {"optimizer": lambda params: DeepSpeedCPUAdam(params, lr=1e-2, bias_correction=False, eps=1e-5)}
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}
    engine = variant.engine(BehaviourNet(), created, optimizer=None, scheduler=scheduler)
    yield from train(engine)


def backward_of_tensors(variant: BehaviourVariant) -> Seen:
    """Call ``loss.backward()``, ``output.backward(gradient)`` and a scaled loss's, not ``engine.backward``."""
    engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=2)
    for step in range(6):
        output = engine(inputs(step))
        if step % 2:
            loss_of(output).backward()
            yield from gradients(engine)
        else:
            output.backward(torch.ones_like(output))
        engine.step()
    yield from counters(engine)
    engine = variant.engine(BehaviourNet(), **FP16)
    for step in range(2):
        engine.scale(loss_of(engine(inputs(step, torch.float16)))).backward()
        yield from gradients(engine)
        engine.step()
        yield from counters(engine)
    loss = loss_of(engine(inputs(4, torch.float16)))
    yield "without scale", raised(loss.backward)


def backwards_without_a_step(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet())
    yield from train(engine)
    for zero_grad in (False, True):
        for step in range(3):
            engine.backward(loss_of(engine(inputs(step))))
            yield from gradients(engine)
            if zero_grad:
                engine.optimizer.zero_grad()
        engine.optimizer.step()
        yield "norm", float(engine.optimizer._global_grad_norm)
        yield from params(engine)


def windows_of_the_caller(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), gradient_clipping=0.1)
    for window in range(3):
        for position in range(3):
            engine.set_gradient_accumulation_boundary(position == 2)
            engine.backward(loss_of(engine(inputs(3 * window + position))))
        yield from gradients(engine)
        engine.step()
        yield from counters(engine)
    engine = variant.engine(BehaviourNet(), gradient_clipping=0.1)
    for step in range(4):
        with engine.coalesce_grad_reduction():
            for part in range(3):
                engine.backward(loss_of(engine(inputs(3 * step + part))))
            yield "refused", raised(engine.step)
        yield from gradients(engine)
        engine.step()
        yield from train(engine, 1, first=20 + step)
    engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=3)
    for step in range(6):
        engine.backward(loss_of(engine(inputs(step))), scale_wrt_gas=False)
        engine.step()


def one_loss_of_several_engines(variant: BehaviourVariant) -> Seen:
    engines = [variant.engine(BehaviourNet()), variant.engine(BehaviourNet(3))]
    for step in range(3):
        losses = [loss_of(engine(inputs(step))) / (1 + index) for index, engine in enumerate(engines)]
        torch.stack(losses).sum().backward()
        for engine in engines:
            yield from gradients(engine)
        for engine in engines:
            engine.step()
            engine.optimizer.zero_grad()
            yield from counters(engine)


class Mixture(BehaviourNet):
    """A leaf module of DeepSpeed, of which a batch reaches one layer. The others get gradients of zero."""

    reached = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers[self.reached](x))


def leaf_modules(variant: BehaviourVariant) -> Seen:
    mixture = Mixture()
    model = torch.nn.Sequential(BehaviourNet(1), mixture, BehaviourNet(1))
    yield "leaves", len(set_z3_leaf_modules(model, [Mixture]))
    engine = variant.engine(model, gradient_accumulation_steps=2)
    for step in range(6):
        mixture.reached = (step + dist.get_rank()) % 4
        engine.backward(loss_of(engine(inputs(step))))
        if engine.is_gradient_accumulation_boundary():
            yield from gradients(engine)
        engine.step()
        yield from counters(engine)


class Shared(BehaviourNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, outside, *others = self.layers
        x = gelu(linear(first(x), outside.weight, outside.bias))
        for layer in others:
            x = x + gelu(checkpoint(layer, x, use_reentrant=False))
        return x


@in_each(BLOCK, eager(CPU))
def parameters_with_several_uses(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(Shared(), gradient_clipping=0.0)
    with slow_updates(variant):
        for step in range(4):
            losses = torch.stack([loss_of(engine(inputs(10 * step + part))) for part in range(1 + step % 2)])
            engine.backward(losses.sum())
            engine.step()
            yield "losses", losses.detach()
            yield from counters(engine)


def reductions(variant: BehaviourVariant) -> Seen:
    not_scattered = {"overlap_comm": False, "contiguous_gradients": False, "reduce_scatter": False}
    in_small_buckets = {"overlap_comm": True, "reduce_bucket_size": 10, "stage3_allgather_sequential": True}
    for settings, changes in (
        (not_scattered, {"gradient_predivide_factor": 4.0}),
        (in_small_buckets, {"gradient_clipping": 0.01}),
        ({"stage3_use_all_reduce_for_fetch_params": True}, {"communication_data_type": "fp32"}),
        ({}, {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}),
    ):
        engine = variant.engine(BehaviourNet(), zero_optimization=settings, gradient_accumulation_steps=2, **changes)
        yield from train(engine, 4)
        yield from gradients(engine)


RECORDERS = "deepspeed.module_inject.auto_ep_presets.base._install_instance_transformers_output_recorders"


def mixtral() -> torch.nn.Module:
    # Imported here, because most ranks do not need it, and importing it takes longer than many scenarios.
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = MixtralConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    return MixtralForCausalLM(shape)


def experts(variant: BehaviourVariant) -> Seen:
    world_size = dist.get_world_size()
    rules = [{"match": "*.experts.*", "states": "streamed"}, {"match": "*.self_attn.*", "states": "cpu"}]
    # One rank has all experts in either case.
    for block, size in ((BLOCK, 1), ({"placement": rules, "unit_size": 700}, world_size))[-world_size:]:
        if variant.block is not None:
            variant.block = block
        autoep = {"enabled": True, "autoep_size": size, "preset_model": "mixtral", "use_grouped_mm": False}
        changes = {
            "expert_parallel": autoep,
            "gradient_clipping": 0.1,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"sub_group_size": 2000},
        }
        with zero.Init(config_dict_or_path=variant.config(**changes)):
            model = mixtral()
        # Transformers does not initialize the experts in this context.
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for param in model.parameters():
                torch.nn.init.normal_(param.data, std=0.2)
        # AutoEP's hooks that record router logits fail with this version of transformers.
        with mock.patch(RECORDERS):
            engine = variant.engine(model, **changes)
        yield "sub-groups", len(engine.optimizer.fp16_groups)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            tokens = on_accelerator(torch.randint(0, 61, (2, 16), generator=generator))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            yield "loss", loss.detach()
            yield from counters(engine)
    if variant.block is not None:
        placements = placements_by_name(engine.optimizer)
        for part, expected in ((".experts.", "streamed"), (".self_attn.", "cpu")):
            assert {found.value for name, found in placements.items() if part in name} == {expected}, placements
