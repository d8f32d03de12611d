"""Make the calls of a user in random order, most of them while an update is in flight."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import utils, zero

from perf_model.schedule.host_layout import KEYS_OF_STATES
from tests.zero.behaviour.behaviour_variant import (
    BLOCK,
    BehaviourNet,
    BehaviourVariant,
    Scenario,
    Seen,
    counters,
    gradients,
    in_each,
    inputs,
    loss_of,
    moments,
    params,
    seen,
    slow_updates,
    train,
    unequal,
)
from tests.zero.behaviour.states import saved
from tests.zero.parity.case import CPU, eager
from tests.zero.parity.random_case import random_block
from tests.zero.parity.training import counted_speculations, shared_folder

CALLS = 24
Call = Callable[[Any, random.Random, Path], Seen]


def train_one_step(engine: Any, rng: random.Random, _: Path) -> Seen:
    yield from train(engine, 1, first=rng.randrange(100))


def skip_a_step(engine: Any, rng: random.Random, _: Path) -> Seen:
    engine.backward(loss_of(engine(inputs(rng.randrange(100)))) * math.inf)
    engine.step()
    yield from counters(engine)


def access_between_backward_and_step(engine: Any, rng: random.Random, folder: Path) -> Seen:
    engine.backward(loss_of(engine(inputs(rng.randrange(100)))))
    access = rng.choice((gradients, params, evaluate, write))
    yield from access(engine, rng, folder) if access in (evaluate, write) else access(engine)
    engine.step()


def evaluate(engine: Any, rng: random.Random, _: Path) -> Seen:
    engine.eval()
    with torch.no_grad():
        yield "evaluated", engine(inputs(rng.randrange(100))).clone()
    engine.train()
    engine.empty_partition_cache()


def save(engine: Any, _: random.Random, folder: Path) -> Seen:
    engine.save_checkpoint(str(folder), tag="tag")
    yield from saved(folder, "tag")


def load(engine: Any, rng: random.Random, folder: Path) -> Seen:
    if (folder / "latest").exists():
        engine.load_checkpoint(str(folder), load_optimizer_states=rng.random() < 0.7)
    yield from ()


def read(engine: Any, rng: random.Random, _: Path) -> Seen:
    if rng.randrange(dist.get_world_size() + 1) in (dist.get_rank(), dist.get_world_size()):
        yield from moments(engine)
    if rng.random() < 0.5:
        yield from params(engine)


def write(engine: Any, rng: random.Random, _: Path) -> Seen:
    param = rng.choice(list(engine.module.parameters()))
    value = torch.linspace(-0.1, 0.1, param.ds_numel).view(param.ds_shape)
    local = torch.full_like(param.ds_tensor, 0.05, dtype=torch.float32)
    match rng.randrange(4):
        case 0:
            utils.safe_set_full_fp32_param(param, value)
            utils.safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
        case 1:
            utils.safe_set_local_fp32_param(param, local)
            utils.safe_set_local_optimizer_state(param, local, "exp_avg")
        case 2:
            # The next forward computes with it, until the next update.
            with zero.GatheredParameters([param], modifier_rank=0):
                param.data.mul_(0.5 if dist.get_rank() == 0 else 1.0)
        case _:
            for group in engine.optimizer.param_groups:
                group.update(lr=rng.choice((1e-5, 1e-3, 1e-1)), betas=rng.choice(((0.9, 0.999), (0.5, 0.9))))
    yield from ()


def zero_grad(engine: Any, *_: Any) -> Seen:
    engine.optimizer.zero_grad()
    yield from ()


AFTER_A_STEP: Sequence[Call] = (skip_a_step, access_between_backward_and_step, evaluate, save, load, read, write)


def calls_in_random_order(seed: int, counted: Counter[str]) -> Scenario:
    """Return the scenario of this seed, eager if odd, which counts its calls during an update and its eager units."""
    drawn = random.Random(seed)
    block = eager(CPU) if seed % 2 else {**random_block(drawn), "overlap_forward": True}
    changes = {
        "bf16": {"enabled": True, **dict.fromkeys(KEYS_OF_STATES[tuple(KEYS_OF_STATES)[seed % 3]], True)},
        "gradient_clipping": drawn.choice((0.0, 0.3)),
        "zero_optimization": {
            "sub_group_size": drawn.randint(150, 500),
            "stage3_prefetch_bucket_size": drawn.choice((0, 1000, 100_000)),
            "stage3_param_persistence_threshold": drawn.choice((0, 50, 200)),
            "stage3_max_live_parameters": drawn.choice((1, 10**9)),
            "stage3_max_reuse_distance": drawn.choice((0, 10**9)),
        },
    }

    @in_each(block)
    def scenario(variant: BehaviourVariant) -> Seen:
        rng = random.Random(seed)
        engine = variant.engine(BehaviourNet(rng.randint(3, 5)), **changes)
        with shared_folder() as folder, slow_updates(variant):
            yield from train_one_step(engine, rng, folder)
            if variant.block is not None:
                counted["eager"] = len(engine.optimizer.plan.eager)
            for call in rng.choices((*AFTER_A_STEP, zero_grad), k=CALLS):
                counted["pending"] += variant.block is not None and engine.optimizer._update._executor.pending
                yield from call(engine, rng, folder)
                if rng.random() < 0.6:
                    yield from train_one_step(engine, rng, folder)

    return scenario


def compare_calls(seeds: Sequence[int]) -> None:
    for seed in seeds:
        counted = Counter[str]()
        scenario = calls_in_random_order(seed, counted)
        stock = seen(scenario, None)
        with counted_speculations() as counts:
            assert unequal(stock, seen(scenario, BLOCK)) == [], seed
        assert len(stock) > 100
        assert counted["pending"] > 5, "too few calls while an update was in flight"
        assert (counts.kept + counts.void > 0) == (counted["eager"] > 0), "the first step, at least, has eager units"
        assert not counted["eager"] or seed % 2
