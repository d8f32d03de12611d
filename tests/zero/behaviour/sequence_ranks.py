"""Run random sequences of calls on random models, with stock and the plugin in lockstep, and compare all results.

Arguments: seeds, and those of ``process_group_on_accelerator``. Every rank prints one answer per seed.
The updates are delayed, so that most calls are made while one is pending.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn
from torch.nn.functional import gelu
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.update import Update
from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from tests.launch import answer
from tests.zero.behaviour.behaviour_variant import same
from tests.zero.on_accelerator import on_accelerator, process_group_on_accelerator
from tests.zero.parity.case import SERIAL, Case
from tests.zero.parity.random_case import random_block
from tests.zero.parity.training import Block, Record, collect, differences, shared_folder
from tests.zero.races.delayed_ranks import delayed

CALLS = 16
IN_PLACE = "read in place"
"""The name of values that are read without a gather."""
Seen = list[tuple[str, torch.Tensor]]
Call = Callable[["TrainedEngine", random.Random], Seen]


@dataclass(frozen=True)
class RandomShape:
    """The random properties of a model.

    ``width`` is even, as DeepSpeed's setters of full values require for two ranks. With ``outside``, one layer's
    parameters are used outside its module. With ``reads_in_hooks``, hooks read the parameters of each layer.
    """

    width: int
    layers: int
    twice: bool
    tied: bool
    outside: bool
    checkpointed: bool
    reentrant: bool
    reads_in_hooks: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> RandomShape:
        flips = [rng.random() < 0.5 for _ in range(6)]
        shape = cls(2 * rng.randint(6, 14), rng.randint(3, 5), *flips)
        # Stock refuses a parameter that two nested backwards reduce.
        return replace(shape, tied=False) if shape.nests else shape

    @property
    def nests(self) -> bool:
        return self.checkpointed and self.reentrant


class SequenceNet(nn.Module):
    """A model of random shape, whose hooks record what they see."""

    def __init__(self, shape: RandomShape, seen_by_hooks: Seen) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(shape.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(shape.layers - 1))
        self.outside = nn.Linear(width, width)
        if shape.tied:
            self.layers[-1].weight = self.layers[0].weight
        if shape.reads_in_hooks:
            for layer in self.layers:
                layer.register_forward_hook(
                    lambda module, *_: seen_by_hooks.extend(
                        ("a hook", param.data.clone()) for param in module.parameters(recurse=False)
                    )
                )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = gelu(first(x))
        if self.shape.twice:
            x = gelu(first(x))
        outside = self.outside
        x = nn.functional.linear(x, outside.weight, outside.bias) if self.shape.outside else outside(x)
        for layer, norm in zip(others, self.norms, strict=True):
            if self.shape.checkpointed:
                x = checkpoint(residual, layer, norm, x, use_reentrant=self.shape.reentrant)
            else:
                x = residual(layer, norm, x)
        return (x.float() ** 2).mean()


def residual(layer: nn.Module, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + gelu(layer(norm(x)))


class TrainedEngine:
    """An engine and the calls of its user.

    Each call returns the values that it sees. ``seen_by_hooks`` holds those that forward hooks have seen.
    """

    def __init__(self, case: Case, shape: RandomShape, block: Block, folder: Path) -> None:
        torch.manual_seed(17)
        self.folder = folder
        self.seen_by_hooks: Seen = []
        model = SequenceNet(shape, self.seen_by_hooks)
        self.shape, self.case = shape, case
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=case.ds_config(block)
        )
        self.saved = False

    @property
    def pending(self) -> bool:
        update = getattr(self.engine.optimizer, "_update", None)
        return update is not None and update._executor.pending

    def param(self, rng: random.Random) -> Any:
        return rng.choice(list(self.engine.module.parameters()))

    def batch(self, rng: random.Random, rows: int = 4) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rng.randrange(1000) + dist.get_rank())
        return on_accelerator((2 * torch.randn(rows, self.shape.width, generator=generator)).bfloat16())

    def train(
        self, rng: random.Random, forwards: int = 1, factor: float = 1.0, before_step: Call | None = None
    ) -> Seen:
        seen: Seen = []
        for _ in range(self.case.accumulation):
            loss = sum(self.engine(self.batch(rng)) for _ in range(forwards))
            self.engine.backward(factor * loss)
            if before_step is not None:
                seen += before_step(self, rng)
            self.engine.step()
            seen.append(("loss", loss.detach()))
        norm = torch.tensor(float(self.engine.get_global_grad_norm()))
        return [*seen, ("norm", norm)]

    def two_forwards_before_a_backward(self, rng: random.Random) -> Seen:
        return self.train(rng, forwards=1 if self.shape.nests else 2)

    def overflow(self, rng: random.Random) -> Seen:
        """Train with a loss of inf, so that the update is skipped."""
        return self.train(rng, factor=math.inf)[:-1]

    def access_states_before_step(self, rng: random.Random) -> Seen:
        """Read or write states before the step, when they may have been prefetched already."""
        call = rng.choice(
            (
                TrainedEngine.set_full,
                TrainedEngine.set_local,
                TrainedEngine.get_full,
                TrainedEngine.gathered,
                TrainedEngine.save,
            )
        )

        def access(trained_engine: TrainedEngine, rng: random.Random) -> Seen:
            seen = call(trained_engine, rng)
            # Before the end of an accumulation window, gradients are not defined: docs/compatibility.md.
            at_boundary = trained_engine.engine.is_gradient_accumulation_boundary()
            return [(name, value) for name, value in seen if at_boundary or name != "grad"]

        return self.train(rng, before_step=access)

    def train_after_an_unused_forward(self, rng: random.Random) -> Seen:
        """Train after one more forward, whose loss is not used."""
        loss = self.engine(self.batch(rng))
        return [*self.train(rng), ("unused loss", loss.detach())]

    def evaluate(self, rng: random.Random) -> Seen:
        self.engine.eval()
        with torch.no_grad():
            loss = self.engine(self.batch(rng))
        self.engine.train()
        return [("loss", loss)]

    def generate(self, rng: random.Random) -> Seen:
        """Run forwards without gradients, but not in eval mode."""
        with torch.no_grad():
            return [("loss", self.engine(self.batch(rng, rows))) for rows in (1, 2, 3)]

    def save(self, rng: random.Random) -> Seen:
        self.saved = True
        self.engine.save_checkpoint(str(self.folder), tag="tag")
        (states,) = self.folder.glob(f"tag/*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
        leaves = tree_leaves(torch.load(states, weights_only=False))
        return [("saved", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def load(self, rng: random.Random) -> Seen:
        if self.saved:
            self.engine.load_checkpoint(str(self.folder), load_optimizer_states=rng.random() < 0.7)
        return []

    def save_16bit(self, rng: random.Random) -> Seen:
        self.engine.save_16bit_model(str(self.folder / "16bit"))
        if dist.get_rank() != 0:
            return []
        return list(torch.load(self.folder / "16bit" / "pytorch_model.bin").items())

    def state_dict(self, rng: random.Random) -> Seen:
        return [(f"{IN_PLACE}, {name}", value.clone()) for name, value in self.engine.module.state_dict().items()]

    def get_full(self, rng: random.Random) -> Seen:
        param = self.param(rng)
        states = [(key, safe_get_full_optimizer_state(param, key)) for key in ("exp_avg", "exp_avg_sq")]
        return [("fp32", safe_get_full_fp32_param(param)), ("grad", safe_get_full_grad(param)), *states]

    def get_local(self, rng: random.Random) -> Seen:
        """Read local states on all ranks, or on one rank while the others continue."""
        param = self.param(rng)
        alone = rng.randrange(2 * dist.get_world_size())
        if alone < dist.get_world_size() and alone != dist.get_rank():
            return []
        state = safe_get_local_optimizer_state(param, "exp_avg")
        return [("fp32", safe_get_local_fp32_param(param)), ("exp_avg", state)]

    def set_full(self, rng: random.Random) -> Seen:
        param = self.param(rng)
        value = torch.linspace(-0.1, 0.1, param.ds_numel).view(param.ds_shape)
        safe_set_full_fp32_param(param, value)
        safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
        return []

    def set_local(self, rng: random.Random) -> Seen:
        param = self.param(rng)
        value = torch.full_like(param.ds_tensor, 0.05, dtype=torch.float32)
        safe_set_local_fp32_param(param, value)
        safe_set_local_optimizer_state(param, value, "exp_avg")
        return []

    def gathered(self, rng: random.Random) -> Seen:
        params = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params):
            return [("gathered", param.data.clone()) for param in params]

    def modify_gathered(self, rng: random.Random) -> Seen:
        """Change a parameter that the next forward computes with, until the next update."""
        param = self.param(rng)
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if dist.get_rank() == 0:
                param.data.mul_(0.5)
        return []

    def persistent_data(self, rng: random.Random) -> Seen:
        """Read the parameters that are persistent or still gathered; the other tensors are empty."""
        return [(IN_PLACE, param.data.clone()) for param in self.engine.module.parameters()]

    def offload(self, rng: random.Random) -> Seen:
        self.engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        self.engine.reload_states()
        return []

    def zero_grad(self, rng: random.Random) -> Seen:
        self.engine.optimizer.zero_grad()
        return []

    def empty_partition_cache(self, rng: random.Random) -> Seen:
        self.engine.empty_partition_cache()
        return []

    def set_hyperparameters(self, rng: random.Random) -> Seen:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rng.choice((1e-5, 1e-3, 1e-1))
            group["betas"] = rng.choice(((0.9, 0.999), (0.5, 0.9)))
        return []

    def step_again(self, rng: random.Random) -> Seen:
        self.engine.step()
        return []


CALLS_AFTER_A_STEP: Sequence[Call] = (
    TrainedEngine.two_forwards_before_a_backward,
    TrainedEngine.overflow,
    TrainedEngine.access_states_before_step,
    TrainedEngine.access_states_before_step,
    TrainedEngine.train_after_an_unused_forward,
    TrainedEngine.evaluate,
    TrainedEngine.generate,
    TrainedEngine.save,
    TrainedEngine.load,
    TrainedEngine.save_16bit,
    TrainedEngine.state_dict,
    TrainedEngine.get_full,
    TrainedEngine.get_local,
    TrainedEngine.set_full,
    TrainedEngine.set_local,
    TrainedEngine.gathered,
    TrainedEngine.modify_gathered,
    TrainedEngine.persistent_data,
    TrainedEngine.offload,
    TrainedEngine.zero_grad,
    TrainedEngine.empty_partition_cache,
    TrainedEngine.set_hyperparameters,
)


def drawn(seed: int) -> tuple[Case, RandomShape, list[tuple[Call, int]], Block]:
    """Return the case, the model, the calls with a seed for each, and the block of the reference.

    Every fourth sequence has calls after which stock reuses old gradients, and the plugin does not. The reference of
    these sequences is the plugin without overlap.
    """
    rng = random.Random(f"sequence {seed}")
    serial = seed % 4 == 3
    case = Case(
        name=f"sequence {seed}",
        blocks=(
            {
                **random_block(rng),
                "overlap_forward": True,
                "overlap_backward": rng.random() < 0.7,
                "eager": seed % 2 == 1,
            },
        ),
        world_size=dist.get_world_size(),
        clip=rng.choice((0.0, 0.3)),
        accumulation=rng.choice((1, 1, 2)),
        schedule=rng.random() < 0.5,
        steps=20,
        sub_group_size=rng.randint(150, 500),
        states=tuple(WIDTHS_OF_STATES)[seed % 3],
        zero={
            "stage3_prefetch_bucket_size": rng.choice((0, 1000, 100_000)),
            "stage3_param_persistence_threshold": rng.choice((0, 50, 50, 200)),
            "stage3_max_live_parameters": rng.choice((1, 10**9)),
            "stage3_max_reuse_distance": rng.choice((0, 10**9)),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    )
    choices = (*CALLS_AFTER_A_STEP, *([TrainedEngine.step_again] * 4 if serial else []))
    calls: list[Call] = [TrainedEngine.train]
    while len(calls) < CALLS:
        calls.append(rng.choice(choices))
        if rng.random() < 0.6:
            calls.append(TrainedEngine.train)
    reference = {**case.blocks[0], **SERIAL} if serial else None
    return (
        case,
        RandomShape.drawn(rng),
        [(call, rng.randrange(10**6)) for call in (*calls, TrainedEngine.train)],
        reference,
    )


def in_lockstep(seed: int, folder: Path) -> dict[str, Any]:
    """Make the calls of this seed on both engines, and return the differences and the calls during an update."""
    case, shape, calls, reference = drawn(seed)
    both = [
        TrainedEngine(case, shape, block, folder / name) for name, block in (("1", reference), ("2", case.blocks[0]))
    ]
    done: list[str] = []
    pending = 0
    for call, call_seed in calls:
        pending += both[1].pending
        done.append(f"{call.__name__}{' during an update' if both[1].pending else ''}")
        expected, found = (
            [*call(trained_engine, random.Random(call_seed)), *trained_engine.seen_by_hooks] for trained_engine in both
        )
        for trained_engine in both:
            trained_engine.seen_by_hooks.clear()
        unequal = [
            name
            for (name, one), (_, other) in zip(expected, found, strict=True)
            if not same(one, other) and not is_gathered_in_one(name, one, other)
        ]
        result = {"seed": seed, "block": case.blocks[0], "shape": repr(shape), "calls": done, "pending": pending}
        if unequal:
            return {**result, "differences": unequal}
    records = [Record(), Record()]
    for trained_engine, record in zip(both, records, strict=True):
        collect(trained_engine.engine.optimizer, record)
        trained_engine.engine.destroy()
    return {**result, "differences": differences(*records)}


def is_gathered_in_one(name: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a value was read in place, and only one of the engines still has its parameter gathered.

    A forward without a backward leaves parameters gathered if they were skipped by a prefetch because they were
    gathered already. DeepSpeed decides this once for each module of the trace, and the plugin limits prefetches.
    """
    return name.startswith(IN_PLACE) and (one.numel() == 0) != (other.numel() == 0)


def trained(seed: int, update_s: float = 0.01) -> dict[str, Any]:
    with shared_folder() as folder, delayed(seed, update_s=update_s, layer_s=0):
        return in_lockstep(seed, folder)


def do_nothing(*_: Any) -> None:
    pass


_wait = Update.wait


def wait_unless_for_states(update: Update, *, states: bool = False) -> None:
    if not states:
        _wait(update)


NAIVE = {
    "forward does not wait": (2, Executor, "publish", do_nothing),
    "other gathers do not wait": (74, Gathers, "_finish_update", do_nothing),
    "readers of states do not wait": (0, Update, "wait", wait_unless_for_states),
    "prefetched states are not discarded": (13, Executor, "sync_states_to_host", do_nothing),
}
"""Removed waits by name: the seed of a sequence on one rank that must notice it, the method, and its replacement."""


def trained_naively(name: str) -> dict[str, Any]:
    """Run the sequence that must notice the removed wait."""
    seed, owner, method, replacement = NAIVE[name]
    with mock.patch.object(owner, method, replacement):
        # The updates are longer here, so that they outlast the calls also on a busy machine.
        return trained(seed, update_s=0.03)


if __name__ == "__main__":
    with process_group_on_accelerator(sys.argv[1:]) as seeds:
        for seed in seeds:
            answer(trained(int(seed)))
