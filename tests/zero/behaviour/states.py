"""Run scenarios that read, write or move parameters and states, end engines, or have unusual models."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import unwrap_model_for_generation
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

from tests.zero.behaviour.behaviour_variant import (
    BY_DTYPE,
    WIDTH,
    BehaviourNet,
    BehaviourVariant,
    Seen,
    counters,
    final_states,
    gradients,
    inputs,
    loss_of,
    moments,
    params,
    raised,
    train,
)
from tests.zero.parity.training import shared_folder


def fragments(variant: BehaviourVariant) -> Seen:
    """Read and write fragments after backward and after the step, in every dtype, with frozen parameters.

    Gradients are written in the model's dtype, as values and by a function of them.
    """
    for dtype, changes in BY_DTYPE.items():
        model = BehaviourNet()
        for param in model.layers[1].parameters():
            param.requires_grad_(False)
        engine = variant.engine(model, **changes)
        all_params = list(model.parameters())
        for step in range(4):
            engine.backward(loss_of(engine(inputs(step, dtype))))
            yield from gradients(engine)
            yield from params(engine)
            for param in all_params:
                yield "local", (safe_get_local_fp32_param(param) is None, safe_get_local_grad(param) is None)
                value = torch.linspace(-0.1, 0.1 + step, param.ds_numel).view(param.ds_shape)
                if step == 1:
                    safe_set_full_fp32_param(param, value)
                    safe_set_full_grad(param, value.to(dtype))
            if step > 1:
                safe_update_full_grad_vectorized(all_params, lambda grad, param, dtype=dtype: (grad * 0.5).to(dtype))
            yield from gradients(engine)
            engine.step()
            yield from params(engine)
            yield from moments(engine)
            for param in all_params:
                value = torch.linspace(0.0, 0.1, param.ds_numel).view(param.ds_shape)
                part = torch.linspace(0.0, 0.1, param.ds_tensor.numel())
                if step == 0:
                    safe_set_full_optimizer_state(param, value, "exp_avg")
                    safe_set_full_fp32_param(param, value)
                elif step == 1:
                    safe_set_local_optimizer_state(param, part, "exp_avg_sq")
                    safe_set_local_fp32_param(param, part)
            yield from params(engine)
            yield from moments(engine)
            yield from counters(engine)
        yield from final_states(engine)


def moments_in_the_dtype_of_the_masters(variant: BehaviourVariant) -> Seen:
    """Assign such moments, and load a checkpoint inside an accumulation window, which converts them with bf16 masters.

    The sums of the window stay.
    """
    for block in ({}, {"placement": "cpu"}, {"placement": "streamed"}):
        variant.replace_block(block)
        engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=3)
        yield from train(engine, 3)
        with shared_folder() as folder:
            engine.save_checkpoint(str(folder))
            engine.backward(loss_of(engine(inputs(7, torch.bfloat16))))
            engine.step()
            engine.load_checkpoint(str(folder))
        yield from train(engine, 5, first=3)
        assigned = variant.engine(BehaviourNet())
        yield from train(assigned, 2)
        for master in assigned.optimizer.fp32_partitioned_groups_flat:
            state = assigned.optimizer.state[master]
            state.update({key: state[key].to(master.dtype) for key in ("exp_avg", "exp_avg_sq")})
        yield from train(assigned, 2, first=3)
        yield from final_states(engine)
        yield from final_states(assigned)


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
    yield from final_states(engine)
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
    yield from final_states(engine)


def one_engine_after_another(variant: BehaviourVariant) -> Seen:
    """Create an engine for the model of a destroyed engine, and one for another model; destroy them during updates."""
    torch.manual_seed(1)
    model = BehaviourNet()
    first = variant.engine(model)
    yield from train(first)
    first.destroy()
    again = variant.engine(model)
    other = variant.engine(BehaviourNet(2))
    for step in range(3):
        yield from train(again, 1, first=step)
        yield from train(other, 1, first=step)
    yield from final_states(again)
    yield from final_states(other)
    other.destroy()
    yield from train(again, 2)


class Tied(torch.nn.Module):
    """A model with parameters that are used twice, used outside their module, and returned by it.

    It is created under nested contexts of ``zero.Init``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        with deepspeed.zero.Init(config_dict_or_path=config):
            self.inner = BehaviourNet(2)
        self.bias = Returned()
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.float().abs() * 5).long() % 11
        x, bias = self.bias(self.inner(self.embed(tokens).mean(1)))
        return self.head(x + bias)


class Returned(torch.nn.Module):
    """A module that also returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x) * self.weight, self.weight


def nested_contexts(variant: BehaviourVariant) -> Seen:
    config = variant.config()
    with deepspeed.zero.Init(config_dict_or_path=config), deepspeed.zero.Init(config_dict_or_path=config):
        model = Tied(config)
        with deepspeed.zero.GatheredParameters(model.embed.weight, modifier_rank=0):
            if dist.get_rank() == 0:
                model.embed.weight.data.fill_(0.25)
    engine = variant.engine(model)
    yield from train(engine)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            model.bias.weight.data.mul_(0.5)
    yield from train(engine)
    yield from final_states(engine)


def generation(variant: BehaviourVariant) -> Seen:
    """Remove and restore DeepSpeed's hooks for generation, while an update may be in flight."""
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
    yield from final_states(engine)


def no_optimizer(variant: BehaviourVariant) -> Seen:
    """Run inference without an optimizer: the config block has no effect."""
    model = BehaviourNet().requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=variant.config(optimizer=None))
    yield "class", type(engine.optimizer).__name__
    with torch.no_grad():
        yield "output", engine(inputs(0)).clone()
    yield "backward", raised(lambda: engine.backward(torch.zeros((), requires_grad=True)))
    engine.destroy()


def reductions(variant: BehaviourVariant) -> Seen:
    """Train with the settings that choose how gradients are reduced, and in which dtype."""
    for zero, changes in (
        (
            {"overlap_comm": False, "contiguous_gradients": False, "reduce_scatter": False},
            {"gradient_predivide_factor": 4.0},
        ),
        (
            {"overlap_comm": True, "reduce_bucket_size": 10, "stage3_allgather_sequential": True},
            {"gradient_clipping": 0.01},
        ),
        (
            {"stage3_use_all_reduce_for_fetch_params": True, "stage3_max_reuse_distance": 0},
            {"communication_data_type": "fp32"},
        ),
        ({}, {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}),
    ):
        engine = variant.engine(BehaviourNet(), zero_optimization=zero, gradient_accumulation_steps=2, **changes)
        yield from train(engine, 4)
        yield from gradients(engine)
        yield from final_states(engine)


class SingleRankGroups:
    """An ``mpu`` whose data-parallel groups have one rank each: each rank trains its own model."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> None:
        return None


def data_parallel_groups_of_an_mpu(variant: BehaviourVariant) -> Seen:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    engine = variant.engine(
        BehaviourNet(), {"mpu": SingleRankGroups(groups[dist.get_rank()]), "dist_init_required": False}
    )
    yield from train(engine, 4)
    yield from params(engine)
    for master in engine.optimizer.fp32_partitioned_groups_flat:
        yield "master", master.data.clone()


def gradients_that_are_switched(variant: BehaviourVariant) -> Seen:
    """Freeze every other parameter in a step, and the others in the next; count the steps.

    The numbers are not compared, because stock reuses old gradients.
    """
    engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=2)
    for step in range(6):
        for index, param in enumerate(engine.module.parameters()):
            param.requires_grad = index % 2 == step // 2 % 2
        engine.backward(loss_of(engine(inputs(step))))
        engine.step()
        for param in engine.module.parameters():
            param.requires_grad = True
        yield "global steps", engine.global_steps


SCENARIOS = (
    fragments,
    moments_in_the_dtype_of_the_masters,
    states_that_move,
    partitions_that_the_caller_replaces,
    one_engine_after_another,
    nested_contexts,
    generation,
    no_optimizer,
    reductions,
    data_parallel_groups_of_an_mpu,
    gradients_that_are_switched,
)
