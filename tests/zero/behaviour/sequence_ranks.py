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

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils
from torch import nn
from torch.nn.functional import gelu
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from tests.launch import answer
from tests.zero.behaviour.behaviour_variant import same
from tests.zero.on_accelerator import on_accelerator, process_group_on_accelerator
from tests.zero.parity.case import CPU, Case, eager
from tests.zero.parity.random_case import random_block
from tests.zero.parity.training import Block, Record, collect, differences, shared_folder
from tests.zero.races.delayed_ranks import delayed

CALLS = 16
Seen = list[tuple[str, torch.Tensor]]
Call = Callable[["TrainedEngine", random.Random], Seen]


@dataclass(frozen=True)
class RandomShape:
    """The random properties of a model. ``width`` is even, as DeepSpeed's setters require for two ranks."""

    width: int
    layers: int
    twice: bool
    tied: bool
    outside: bool
    """Whether one layer's parameters are used outside its module."""
    checkpointed: bool
    reentrant: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> RandomShape:
        flips = [rng.random() < 0.5 for _ in range(5)]
        shape = cls(2 * rng.randint(6, 14), rng.randint(3, 5), *flips)
        # Stock refuses a parameter that two nested backwards reduce.
        return replace(shape, tied=False) if shape.nests else shape

    @property
    def nests(self) -> bool:
        return self.checkpointed and self.reentrant


class SequenceNet(nn.Module):
    """A model of random shape."""

    def __init__(self, shape: RandomShape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(shape.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(shape.layers - 1))
        self.outside = nn.Linear(width, width)
        if shape.tied:
            self.layers[-1].weight = self.layers[0].weight

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
    """An engine and the calls of its user, each of which returns the values that it sees."""

    def __init__(self, case: Case, shape: RandomShape, block: Block, folder: Path) -> None:
        torch.manual_seed(17)
        self.folder = folder
        model = SequenceNet(shape)
        self.shape, self.case = shape, case
        params = list(model.parameters())
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=case.ds_config(block))
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
        user = TrainedEngine
        call = rng.choice((user.set_full, user.set_local, user.get_full, user.gathered, user.save))

        def access(_: TrainedEngine, rng: random.Random) -> Seen:
            # Before the end of an accumulation window, gradients are not defined: docs/compatibility.md.
            at_boundary = self.engine.is_gradient_accumulation_boundary()
            return [(name, value) for name, value in call(self, rng) if at_boundary or name != "grad"]

        return self.train(rng, before_step=access)

    def evaluate(self, rng: random.Random) -> Seen:
        self.engine.eval()
        with torch.no_grad():
            loss = self.engine(self.batch(rng))
        self.engine.train()
        return [("loss", loss)]

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

    def get_full(self, rng: random.Random) -> Seen:
        param = self.param(rng)
        states = [(key, utils.safe_get_full_optimizer_state(param, key)) for key in ("exp_avg", "exp_avg_sq")]
        return [("fp32", utils.safe_get_full_fp32_param(param)), ("grad", utils.safe_get_full_grad(param)), *states]

    def get_local(self, rng: random.Random) -> Seen:
        """Read local states on all ranks, or on one rank while the others continue."""
        param = self.param(rng)
        alone = rng.randrange(2 * dist.get_world_size())
        if alone < dist.get_world_size() and alone != dist.get_rank():
            return []
        state = utils.safe_get_local_optimizer_state(param, "exp_avg")
        return [("fp32", utils.safe_get_local_fp32_param(param)), ("exp_avg", state)]

    def set_full(self, rng: random.Random) -> Seen:
        param = self.param(rng)
        value = torch.linspace(-0.1, 0.1, param.ds_numel).view(param.ds_shape)
        utils.safe_set_full_fp32_param(param, value)
        utils.safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
        return []

    def set_local(self, rng: random.Random) -> Seen:
        param = self.param(rng)
        value = torch.full_like(param.ds_tensor, 0.05, dtype=torch.float32)
        utils.safe_set_local_fp32_param(param, value)
        utils.safe_set_local_optimizer_state(param, value, "exp_avg")
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


CALLS_AFTER_A_STEP: Sequence[Call] = (
    TrainedEngine.two_forwards_before_a_backward,
    TrainedEngine.overflow,
    TrainedEngine.access_states_before_step,
    TrainedEngine.access_states_before_step,
    TrainedEngine.evaluate,
    TrainedEngine.save,
    TrainedEngine.load,
    TrainedEngine.get_full,
    TrainedEngine.get_local,
    TrainedEngine.set_full,
    TrainedEngine.set_local,
    TrainedEngine.gathered,
    TrainedEngine.modify_gathered,
    TrainedEngine.zero_grad,
    TrainedEngine.empty_partition_cache,
    TrainedEngine.set_hyperparameters,
)


def drawn(seed: int) -> tuple[Case, RandomShape, list[tuple[Call, int]]]:
    """Return the case, the model, and the calls with a seed for each."""
    rng = random.Random(f"sequence {seed}")
    case = Case(
        name=f"sequence {seed}",
        blocks=(eager(CPU) if seed % 2 else {**random_block(rng), "overlap_forward": True},),
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
    calls: list[Call] = [TrainedEngine.train]
    while len(calls) < CALLS:
        calls.append(rng.choice(CALLS_AFTER_A_STEP))
        if rng.random() < 0.6:
            calls.append(TrainedEngine.train)
    shape = RandomShape.drawn(rng)
    return case, shape, [(call, rng.randrange(10**6)) for call in (*calls, TrainedEngine.train)]


def in_lockstep(seed: int, folder: Path) -> dict[str, Any]:
    """Make the calls of this seed on both engines, and return the differences and the calls during an update."""
    case, shape, calls = drawn(seed)
    both = [TrainedEngine(case, shape, block, folder / str(bool(block))) for block in (None, case.blocks[0])]
    done: list[str] = []
    pending = 0
    for call, call_seed in calls:
        pending += both[1].pending
        done.append(f"{call.__name__}{' during an update' if both[1].pending else ''}")
        expected, found = (call(trained_engine, random.Random(call_seed)) for trained_engine in both)
        pairs = zip(expected, found, strict=True)
        unequal = [name for (name, one), (_, other) in pairs if not same(one, other)]
        result = {"seed": seed, "block": case.blocks[0], "shape": repr(shape), "calls": done, "pending": pending}
        if unequal:
            return {**result, "differences": unequal}
    records = [Record(), Record()]
    for trained_engine, record in zip(both, records, strict=True):
        collect(trained_engine.engine.optimizer, record)
        trained_engine.engine.destroy()
    return {**result, "differences": differences(*records)}


def trained(seed: int) -> dict[str, Any]:
    with shared_folder() as folder, delayed(seed, update_s=0.01, layer_s=0):
        return in_lockstep(seed, folder)


if __name__ == "__main__":
    with process_group_on_accelerator(sys.argv[1:]) as seeds:
        for seed in seeds:
            answer(trained(int(seed)))
