"""Random models and random sequences of calls, on stock and on the plugin in lockstep: all that is seen must be equal.

Arguments: the seeds, or ``naive``. Every rank prints an answer for each. Updates are late, so that most calls come upon
one.
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
from tests.launch import answer
from tests.zero.parity.arm import Block, Record, collect, differences, shared_folder
from tests.zero.parity.case import SERIAL, Case
from tests.zero.parity.random_case import random_block
from tests.zero.process_group import process_group
from tests.zero.scripts.delayed import delayed

CALLS = 16
Seen = list[tuple[str, torch.Tensor]]
Call = Callable[["Trained", random.Random], Seen]


@dataclass(frozen=True)
class Shape:
    """What of a model is drawn; ``width`` is even, as DeepSpeed's setters of full values want it for two ranks."""

    width: int
    layers: int
    twice: bool
    tied: bool
    outside: bool
    checkpointed: bool
    reentrant: bool
    looks: bool

    @classmethod
    def drawn(cls, lot: random.Random) -> Shape:
        flips = [lot.random() < 0.5 for _ in range(6)]
        shape = cls(2 * lot.randint(6, 14), lot.randint(3, 5), *flips)
        # Stock refuses a parameter that two nested backwards reduce.
        return replace(shape, tied=False) if shape.nests else shape

    @property
    def nests(self) -> bool:
        return self.checkpointed and self.reentrant


class Net(nn.Module):
    def __init__(self, shape: Shape, looked_at: Seen) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(shape.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(shape.layers - 1))
        self.outside = nn.Linear(width, width)
        if shape.tied:
            self.layers[-1].weight = self.layers[0].weight
        if shape.looks:
            for layer in self.layers:
                layer.register_forward_hook(
                    lambda module, *_: looked_at.extend(
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


class Trained:
    """An engine, and what its caller does with it. Each call returns what it has seen, besides what hooks saw."""

    def __init__(self, case: Case, shape: Shape, block: Block, folder: Path) -> None:
        torch.manual_seed(17)
        self.folder = folder
        self.looked_at: Seen = []
        model = Net(shape, self.looked_at)
        self.shape, self.case = shape, case
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=case.ds_config(block)
        )
        self.saved = False

    @property
    def pending(self) -> bool:
        update = getattr(self.engine.optimizer, "_update", None)
        return update is not None and update._executor.pending

    def param(self, lot: random.Random) -> Any:
        return lot.choice(list(self.engine.module.parameters()))

    def batch(self, lot: random.Random, rows: int = 4) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * lot.randrange(1000) + dist.get_rank())
        return (2 * torch.randn(rows, self.shape.width, generator=generator)).bfloat16()

    def train(
        self, lot: random.Random, forwards: int = 1, factor: float = 1.0, before_step: Call | None = None
    ) -> Seen:
        seen: Seen = []
        for _ in range(self.case.accumulation):
            loss = sum(self.engine(self.batch(lot)) for _ in range(forwards))
            self.engine.backward(factor * loss)
            if before_step is not None:
                seen += before_step(self, lot)
            self.engine.step()
            seen.append(("loss", loss.detach()))
        norm = torch.tensor(float(self.engine.get_global_grad_norm()))
        return [*seen, ("norm", norm)]

    def two_forwards_before_a_backward(self, lot: random.Random) -> Seen:
        return self.train(lot, forwards=1 if self.shape.nests else 2)

    def overflow(self, lot: random.Random) -> Seen:
        """No update."""
        return self.train(lot, factor=math.inf)[:-1]

    def something_before_step(self, lot: random.Random) -> Seen:
        """When states may be on their way to the accelerator already."""
        call = lot.choice((Trained.set_full, Trained.set_local, Trained.get_full, Trained.gathered, Trained.save))
        return self.train(lot, before_step=call)

    def one_of_two_micro_batches_again(self, lot: random.Random) -> Seen:
        """Forwards whose losses nobody needs, between the micro-batches."""
        loss = self.engine(self.batch(lot))
        return [*self.train(lot), ("unused loss", loss.detach())]

    def evaluate(self, lot: random.Random) -> Seen:
        self.engine.eval()
        with torch.no_grad():
            loss = self.engine(self.batch(lot))
        self.engine.train()
        return [("loss", loss)]

    def generate(self, lot: random.Random) -> Seen:
        """Without gradients, but not in eval mode."""
        with torch.no_grad():
            return [("loss", self.engine(self.batch(lot, rows))) for rows in (1, 2, 3)]

    def save(self, lot: random.Random) -> Seen:
        self.saved = True
        self.engine.save_checkpoint(str(self.folder), tag="tag")
        (states,) = self.folder.glob(f"tag/*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
        leaves = tree_leaves(torch.load(states, weights_only=False))
        return [("saved", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def load(self, lot: random.Random) -> Seen:
        if self.saved:
            self.engine.load_checkpoint(str(self.folder), load_optimizer_states=lot.random() < 0.7)
        return []

    def save_16bit(self, lot: random.Random) -> Seen:
        self.engine.save_16bit_model(str(self.folder / "16bit"))
        if dist.get_rank() != 0:
            return []
        return list(torch.load(self.folder / "16bit" / "pytorch_model.bin").items())

    def state_dict(self, lot: random.Random) -> Seen:
        return [(name, value.clone()) for name, value in self.engine.module.state_dict().items()]

    def get_full(self, lot: random.Random) -> Seen:
        param = self.param(lot)
        states = [(key, safe_get_full_optimizer_state(param, key)) for key in ("exp_avg", "exp_avg_sq")]
        return [("fp32", safe_get_full_fp32_param(param)), ("grad", safe_get_full_grad(param)), *states]

    def get_local(self, lot: random.Random) -> Seen:
        """Of all ranks, or of one, and the others go on."""
        param = self.param(lot)
        alone = lot.randrange(2 * dist.get_world_size())
        if alone < dist.get_world_size() and alone != dist.get_rank():
            return []
        state = safe_get_local_optimizer_state(param, "exp_avg")
        return [("fp32", safe_get_local_fp32_param(param)), ("exp_avg", state)]

    def set_full(self, lot: random.Random) -> Seen:
        param = self.param(lot)
        value = torch.linspace(-0.1, 0.1, param.ds_numel).view(param.ds_shape)
        safe_set_full_fp32_param(param, value)
        safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
        return []

    def set_local(self, lot: random.Random) -> Seen:
        param = self.param(lot)
        value = torch.full_like(param.ds_tensor, 0.05, dtype=torch.float32)
        safe_set_local_fp32_param(param, value)
        safe_set_local_optimizer_state(param, value, "exp_avg")
        return []

    def gathered(self, lot: random.Random) -> Seen:
        params = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params):
            return [("gathered", param.data.clone()) for param in params]

    def modified(self, lot: random.Random) -> Seen:
        """What the next forward computes with, until the next update."""
        param = self.param(lot)
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if dist.get_rank() == 0:
                param.data.mul_(0.5)
        return []

    def kept_data(self, lot: random.Random) -> Seen:
        """Of the parameters that DeepSpeed keeps gathered, read in place; empty for the others."""
        return [("data", param.data.clone()) for param in self.engine.module.parameters()]

    def offload(self, lot: random.Random) -> Seen:
        self.engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        self.engine.reload_states()
        return []

    def zero_grad(self, lot: random.Random) -> Seen:
        self.engine.optimizer.zero_grad()
        return []

    def empty_partition_cache(self, lot: random.Random) -> Seen:
        self.engine.empty_partition_cache()
        return []

    def set_numbers(self, lot: random.Random) -> Seen:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lot.choice((1e-5, 1e-3, 1e-1))
            group["betas"] = lot.choice(((0.9, 0.999), (0.5, 0.9)))
        return []

    def step_again(self, lot: random.Random) -> Seen:
        self.engine.step()
        return []


CALLS_AFTER_A_STEP: Sequence[Call] = (
    Trained.two_forwards_before_a_backward,
    Trained.overflow,
    Trained.something_before_step,
    Trained.something_before_step,
    Trained.one_of_two_micro_batches_again,
    Trained.evaluate,
    Trained.generate,
    Trained.save,
    Trained.load,
    Trained.save_16bit,
    Trained.state_dict,
    Trained.get_full,
    Trained.get_local,
    Trained.set_full,
    Trained.set_local,
    Trained.gathered,
    Trained.modified,
    Trained.kept_data,
    Trained.offload,
    Trained.zero_grad,
    Trained.empty_partition_cache,
    Trained.set_numbers,
)


def drawn(seed: int) -> tuple[Case, Shape, list[tuple[Call, int]], Block]:
    """The case, the model, the calls with a seed for each, and the block of the reference.

    Every fourth has calls after which stock goes on with old gradients, which we do not; their reference is the plugin
    without overlap.
    """
    lot = random.Random(f"sequence {seed}")
    serial = seed % 4 == 3
    case = Case(
        name=f"sequence {seed}",
        blocks=({**random_block(lot), "overlap_forward": True, "overlap_backward": lot.random() < 0.7},),
        world_size=dist.get_world_size(),
        clip=lot.choice((0.0, 0.3)),
        accumulation=lot.choice((1, 1, 2)),
        schedule=lot.random() < 0.5,
        steps=20,
        sub_group_size=lot.randint(150, 500),
        zero={
            "stage3_prefetch_bucket_size": lot.choice((0, 1000, 100_000)),
            "stage3_param_persistence_threshold": lot.choice((0, 50, 50, 200)),
            "stage3_max_live_parameters": lot.choice((1, 10**9)),
            "stage3_max_reuse_distance": lot.choice((0, 10**9)),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    )
    choices = (*CALLS_AFTER_A_STEP, *([Trained.step_again] * 4 if serial else []))
    calls: list[Call] = [Trained.train]
    while len(calls) < CALLS:
        calls.append(lot.choice(choices))
        if lot.random() < 0.6:
            calls.append(Trained.train)
    reference = {**case.blocks[0], **SERIAL} if serial else None
    return case, Shape.drawn(lot), [(call, lot.randrange(10**6)) for call in (*calls, Trained.train)], reference


def in_lockstep(seed: int, folder: Path) -> dict[str, Any]:
    case, shape, calls, reference = drawn(seed)
    both = [Trained(case, shape, block, folder / name) for name, block in (("1", reference), ("2", case.blocks[0]))]
    done: list[str] = []
    pending = 0
    for call, call_seed in calls:
        pending += both[1].pending
        done.append(f"{call.__name__}{' of a pending update' if both[1].pending else ''}")
        expected, found = ([*call(its, random.Random(call_seed)), *its.looked_at] for its in both)
        for its in both:
            its.looked_at.clear()
        unequal = [name for (name, one), (_, other) in zip(expected, found, strict=True) if not torch.equal(one, other)]
        told = {"seed": seed, "block": case.blocks[0], "shape": repr(shape), "calls": done, "pending": pending}
        if unequal:
            return {**told, "differences": unequal}
    records = [Record(), Record()]
    for its, record in zip(both, records, strict=True):
        collect(its.engine.optimizer, record)
        its.engine.destroy()
    return {**told, "differences": differences(*records)}


def trained(seed: int, update_s: float = 0.01) -> dict[str, Any]:
    with shared_folder() as folder, delayed(seed, update_s=update_s, layer_s=0):
        return in_lockstep(seed, folder)


def nothing(*_: Any) -> None:
    pass


NAIVE = {
    "forward does not wait": (2, Executor, "publish"),
    "other gathers do not wait": (74, Gathers, "_settle"),
    "readers of states do not wait": (9, Update, "drain"),
    "what was prefetched is not forgotten": (13, Executor, "discard"),
}
"""Waits left out, by name: the sequence, of one rank, that must notice, and the method that does nothing."""


def naive() -> None:
    for name, (seed, owner, method) in NAIVE.items():
        with mock.patch.object(owner, method, nothing):
            # Longer updates, which a script on a busy machine does not outlast.
            answer({"naive": name, "noticed": trained(seed, update_s=0.03)["differences"]})


if __name__ == "__main__":
    with process_group():
        for argument in sys.argv[1:]:
            if argument == "naive":
                naive()
            else:
                answer(trained(int(argument)))
