"""Draw a case from a seed, for runs that are longer than any list of cases."""

from __future__ import annotations

import random
from typing import Any

from tests.zero.parity.case import Case, ParamGroup, by_sub_group


def random_case(seed: int, world_size: int) -> Case:
    rng = random.Random(seed)
    dtype = rng.choice(("bf16", "bf16", "fp16", "fp32"))
    accumulation = rng.choice((1, 1, 2, 3))
    return Case(
        name=f"random {seed}",
        blocks=({**random_block(rng), "eager": seed % 2 == 1},),
        world_size=world_size,
        dtype=dtype,
        steps=rng.randint(3, 6),
        clip=rng.choice((0.0, 0.3)),
        accumulation=accumulation,
        caller_accumulates=rng.random() < 0.2,
        groups=rng.choice(((ParamGroup(),), (ParamGroup(), ParamGroup(lr=1e-3, weight_decay=0.2)))),
        adamw=rng.random() < 0.7,
        widths=tuple(rng.randint(5, 70) for _ in range(rng.randint(3, 7))),
        sub_group_size=rng.randint(300, 4000),
        frozen=rng.random() < 0.2,
        zero_init=rng.random() < 0.3,
        unused=rng.random() < 0.2,
        poisoned={1: float("inf")} if rng.random() < 0.2 else {},
        offload_param=rng.random() < 0.15,
        zero={
            "reduce_bucket_size": rng.choice((1, 1000, 4000, 100_000)),
            "stage3_prefetch_bucket_size": rng.choice((1, 4000, 100_000)),
            "stage3_param_persistence_threshold": rng.choice((0, 50, 100_000)),
            "stage3_max_live_parameters": rng.choice((1, 10**9)),
            "reduce_scatter": rng.random() < 0.7,
            "overlap_comm": rng.random() < 0.8,
        },
        shares_host_memory=rng.random() < 0.5,
    )


def random_block(rng: random.Random) -> dict[str, Any]:
    placement: dict[str, Any] = rng.choice(
        (
            {"placement": "cpu"},
            {"placement": "streamed"},
            {"placement": "stride", "update_stride": rng.randint(2, 4)},
            by_sub_group(rng.choice(("cpu", "streamed")), "resident"),
        )
    )
    switches = {f"overlap_{window}": rng.random() < 0.7 for window in ("forward", "backward")}
    return {**placement, **switches, "num_slots": rng.randint(1, 4)}
