"""Run scenarios that call backward in different ways, or accumulate gradients over several backwards."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch.utils.checkpoint import checkpoint

from tests.zero.behaviour.behaviour_variant import (
    FP16,
    FP32,
    WIDTH,
    BehaviourNet,
    BehaviourVariant,
    Seen,
    counters,
    final_states,
    gradients,
    inputs,
    loss_of,
    params,
    raised,
    train,
)
from tests.zero.parity.training import real_numel


def backward_of_the_tensor(variant: BehaviourVariant) -> Seen:
    """Call ``loss.backward()`` and ``output.backward(gradient)`` instead of ``engine.backward``."""
    engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=2)
    for step in range(6):
        output = engine(inputs(step))
        if step % 2:
            loss_of(output).backward()
        else:
            output.backward(torch.ones_like(output))
        if engine.is_gradient_accumulation_boundary():
            yield from gradients(engine)
        engine.step()
    yield from counters(engine)
    yield from final_states(engine)


def backward_of_the_scaled_loss(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), **FP16)
    for step in range(3):
        engine.scale(loss_of(engine(inputs(step, torch.float16)))).backward()
        yield from gradients(engine)
        engine.step()
        yield from counters(engine)
    yield from final_states(engine)
    yield "needs a scaler", engine.optimizer.needs_scaler()
    loss = loss_of(engine(inputs(4, torch.float16)))
    yield "without scale", raised(loss.backward)


def gradients_not_scaled_by_accumulation(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), gradient_accumulation_steps=3)
    for step in range(6):
        engine.backward(loss_of(engine(inputs(step))), scale_wrt_gas=False)
        engine.step()
        yield from counters(engine)
    yield from final_states(engine)


def backwards_without_a_step(variant: BehaviourVariant) -> Seen:
    """Accumulate gradients from forward to forward until ``zero_grad``, and call the optimizer's own ``step``."""
    engine = variant.engine(BehaviourNet())
    yield from train(engine)
    for zero_grad in (False, True):
        for step in range(3):
            engine.backward(loss_of(engine(inputs(step))))
            yield from gradients(engine)
            for group, grads in engine.optimizer.get_fp32_grad_partitions().items():
                for index, grad in grads.items():
                    param = engine.optimizer.fp16_groups[group][index]
                    yield f"partition {group} {index}", grad.flatten()[: real_numel(param)].clone()
            if zero_grad:
                engine.optimizer.zero_grad()
        engine.optimizer.step()
        yield "norm", float(engine.optimizer._global_grad_norm)
        yield from params(engine)
    yield from final_states(engine)


def boundaries_that_the_caller_sets(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet())
    for window in range(3):
        for position in range(3):
            engine.set_gradient_accumulation_boundary(position == 2)
            engine.backward(loss_of(engine(inputs(3 * window + position))))
        yield from gradients(engine)
        engine.step()
        yield from counters(engine)
    yield from final_states(engine)


def coalesced_reduction(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), gradient_clipping=0.1)
    for step in range(4):
        with engine.coalesce_grad_reduction():
            for part in range(3):
                engine.backward(loss_of(engine(inputs(3 * step + part))))
        yield from gradients(engine)
        engine.step()
        yield from counters(engine)
        yield from train(engine, 1, first=20 + step)
    yield from final_states(engine)


def calls_that_zero_3_refuses(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet())
    yield from train(engine)
    yield "no_sync", raised(engine.no_sync().__enter__)
    engine.backward(loss_of(engine(inputs(9))))
    with engine.coalesce_grad_reduction():
        yield "step while coalescing", raised(engine.step)
        yield "coalescing while coalescing", raised(engine.coalesce_grad_reduction().__enter__)
    engine.step()
    yield "not a scalar", raised(lambda: engine.scale(engine(inputs(10))))
    yield from train(engine)
    yield from final_states(engine)


def one_loss_of_several_engines(variant: BehaviourVariant) -> Seen:
    engines = [variant.engine(BehaviourNet()), variant.engine(BehaviourNet(3)), variant.engine(BehaviourNet(2))]
    for step in range(3):
        losses = [loss_of(engine(inputs(step))) / (1 + index) for index, engine in enumerate(engines)]
        torch.stack(losses).sum().backward()
        for engine in engines:
            yield from gradients(engine)
        for engine in engines:
            engine.step()
            engine.optimizer.zero_grad()
    for engine in engines:
        yield from counters(engine)
        yield from final_states(engine)


class Checkpointed(torch.nn.Module):
    """Blocks with a frozen norm, and a low-rank adapter in parallel to a frozen layer, recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.frozen = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.adapters = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.Linear(5, WIDTH)) for _ in range(3)
        )
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        for param in (*self.norms.parameters(), *self.frozen.parameters()):
            param.requires_grad_(False)

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[index](x)
        return torch.tanh(self.frozen[index](x) + self.adapters[index](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = checkpoint(self.block, index, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def recomputed_activations(variant: BehaviourVariant) -> Seen:
    """Recompute reentrantly and not, in bf16 and fp32, with frozen parameters that are persistent and that are not."""
    for use_reentrant, dtype, threshold in (
        (True, torch.bfloat16, WIDTH),
        (False, torch.bfloat16, WIDTH),
        (False, torch.float32, 0),
    ):
        engine = variant.engine(
            Checkpointed(use_reentrant),
            gradient_accumulation_steps=2,
            zero_optimization={"stage3_param_persistence_threshold": threshold, "sub_group_size": 80},
            **(FP32 if dtype is torch.float32 else {}),
        )
        for step in range(4):
            engine.backward(loss_of(engine(inputs(step, dtype).requires_grad_())))
            if engine.is_gradient_accumulation_boundary():
                yield from gradients(engine)
            engine.step()
            yield from counters(engine)
            statuses = [param.ds_status.name for param in engine.module.parameters()]
            yield "gathered after the step", statuses
        yield from final_states(engine)


class Recomputed(BehaviourNet):
    """A network that recomputes with DeepSpeed's own activation checkpointing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(deepspeed.checkpointing.checkpoint(layer, x))
        return x


def activation_checkpointing_of_deepspeed(variant: BehaviourVariant) -> Seen:
    """Recompute without ``cpu_checkpointing``, which loses the inputs on the CPU accelerator, also with stock."""
    deepspeed.checkpointing.configure(None, num_checkpoints=4)
    engine = variant.engine(Recomputed(), zero_optimization={"offload_param": {"device": "cpu"}})
    for step in range(4):
        engine.backward(loss_of(engine(inputs(step).requires_grad_())))
        yield from gradients(engine)
        engine.step()
        yield from counters(engine)
    yield from final_states(engine)


class Experts(torch.nn.Module):
    """Experts of which a batch reaches one. As a leaf module, the others get gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return torch.tanh(self.experts[expert](x))


class Mixture(torch.nn.Module):
    """A model that uses one of its experts per forward, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.last(self.experts(self.first(x), expert))


def leaf_modules(variant: BehaviourVariant) -> Seen:
    """Train leaf modules: each rank's batch reaches a different expert, and some experts get no batch."""
    for accumulation in (1, 2):
        model = Mixture()
        yield "leaves", len(set_z3_leaf_modules(model, [Experts]))
        engine = variant.engine(model, gradient_accumulation_steps=accumulation)
        yield "leaves of the optimizer", len(engine.optimizer.leaf_parameters)
        for step in range(6):
            expert = (step + dist.get_rank()) % 4
            engine.backward(loss_of(engine(inputs(step), expert)))
            if engine.is_gradient_accumulation_boundary():
                yield from gradients(engine)
            engine.step()
            yield from counters(engine)
        yield from final_states(engine)


SCENARIOS = (
    backward_of_the_tensor,
    backward_of_the_scaled_loss,
    gradients_not_scaled_by_accumulation,
    backwards_without_a_step,
    boundaries_that_the_caller_sets,
    coalesced_reduction,
    calls_that_zero_3_refuses,
    one_loss_of_several_engines,
    recomputed_activations,
    activation_checkpointing_of_deepspeed,
    leaf_modules,
)
