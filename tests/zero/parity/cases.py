"""List the parity cases, which cover pairs of features that could interact."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from tests.zero.parity.case import (
    CPU,
    EVERY_PLACEMENT,
    RESIDENT,
    SERIAL,
    STREAMED,
    STREAMED_ONE_SLOT,
    STRIDE_2,
    STRIDE_3,
    STRIDE_OF_SUB_GROUPS,
    WITHOUT_BACKWARD_OVERLAP,
    WITHOUT_FORWARD_OVERLAP,
    Case,
    ParamGroup,
    by_name,
    by_sub_group,
    eager,
)

BASE_GROUP = ParamGroup()
DECAYING_GROUP = ParamGroup(lr=1e-3, weight_decay=0.2)
OTHER_BETAS_GROUP = ParamGroup(lr=2e-3, betas=(0.8, 0.95), weight_decay=0.0)
TWO_DECAYS, TWO_BETAS = (BASE_GROUP, DECAYING_GROUP), (BASE_GROUP, OTHER_BETAS_GROUP)

OFFLOADED_MIX = {
    **by_sub_group("resident", "streamed", "cpu", "streamed", "resident"),
    "num_slots": 1,
    "unit_size": 600,
}
RULES = by_name({"layers.0.*": "resident", "*.bias layers.3.*": "cpu", "layers.[12].weight": "streamed"}, unit_size=600)
OTHER_RULES = by_name({"layers.1.weight": "cpu", "*.weight": "resident", "*": "streamed"}, unit_size=1500, num_slots=1)
PLANNED_REST = by_name({"layers.0.*": "resident", "*.2.*": "streamed"})

INF, NAN = float("inf"), float("nan")
ALL_ON_DISK = {**CPU, "unit_size": 5000, "host_memory_gb": 0.0}
SOME_ON_DISK = {**STRIDE_2, "unit_size": 3000, "host_memory_gb": 0.0004}

ON_DISK = Case(name="", blocks=(), widths=(40, 150, 130, 90, 30), sub_group_size=6000, disk=tempfile.gettempdir())
"""A model with units of several pages. With ``host_memory_gb`` of 0, all but small parameters are on disk."""

BY_DTYPES = (CPU, STREAMED_ONE_SLOT, STRIDE_2, {**STRIDE_3, **SERIAL}, eager(CPU), eager(STRIDE_3), RULES)
IN_FP32: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}

CASES = (
    Case(
        name="every placement",
        blocks=(
            *EVERY_PLACEMENT,
            *({**STRIDE_3, **switches} for switches in (SERIAL, WITHOUT_FORWARD_OVERLAP, WITHOUT_BACKWARD_OVERLAP)),
            eager({**STRIDE_3, **WITHOUT_FORWARD_OVERLAP}),
        ),
        steps=6,
        clip=0.5,
    ),
    Case(name="bf16 masters, every placement", states="bf16-masters", blocks=BY_DTYPES, clip=0.5),
    Case(name="bf16 states, every placement", states="bf16", blocks=BY_DTYPES, clip=0.5),
    Case(
        name="2 ranks, bf16 masters, gradients summed in fp32, shared host memory",
        states="bf16-masters",
        blocks=({}, CPU, eager(STRIDE_2)),
        world_size=2,
        zero_init=True,
        accumulation=3,
        clip=0.5,
        extra=IN_FP32,
        shares_host_memory=True,
    ),
    Case(
        name="bf16 states, offloaded parameters, resume",
        states="bf16",
        blocks=(OFFLOADED_MIX, eager(OFFLOADED_MIX)),
        offload_param=True,
        clip=0.5,
        resume=True,
    ),
    Case(name="planned, from a quick profile", blocks=({},), shares_host_memory=True),
    Case(
        name="residents, clipping, reload in process",
        blocks=(
            {**by_sub_group("streamed", "resident", "cpu", "resident", "streamed"), "num_slots": 1, "unit_size": 400},
            {**RESIDENT, **WITHOUT_BACKWARD_OVERLAP},
        ),
        steps=20,
        reload=(5, 9),
        clip=0.5,
    ),
    Case(
        name="rules by name, reload in process",
        blocks=(RULES, {**OTHER_RULES, **SERIAL}, eager(RULES), PLANNED_REST),
        steps=12,
        reload=(5, 7),
        clip=0.5,
    ),
    Case(
        name="rules by name, one sub-group, two groups, fp32, resume",
        blocks=(OTHER_RULES, eager(OTHER_RULES), PLANNED_REST),
        dtype="fp32",
        groups=TWO_DECAYS,
        sub_group_size=10**9,
        resume=True,
    ),
    Case(name="one sub-group", thorough=True, blocks=(CPU, STREAMED, STRIDE_2), sub_group_size=10**9),
    Case(
        # Weight and bias of a layer are two sub-groups, and one unit.
        name="a sub-group per parameter",
        blocks=tuple({**block, "unit_size": 10**5} for block in (CPU, STREAMED, STRIDE_2, eager(STRIDE_2), RESIDENT)),
        sub_group_size=0,
        clip=0.5,
        accumulation=2,
        zero={"stage3_param_persistence_threshold": 0},
    ),
    Case(
        name="fp32, Adam, two groups, frozen, accumulation 3",
        blocks=(STRIDE_2, STREAMED, {**STRIDE_2, **SERIAL}, eager(STRIDE_2)),
        dtype="fp32",
        adamw=False,
        groups=TWO_DECAYS,
        frozen=True,
        accumulation=3,
        schedule=False,
    ),
    Case(
        name="fp16, overflow, clipping",
        blocks=(STRIDE_OF_SUB_GROUPS, STREAMED_ONE_SLOT, CPU, {**CPU, **SERIAL}, eager(CPU)),
        dtype="fp16",
        clip=0.5,
        steps=12,
        poisoned={2: 1e6, 7: INF},
    ),
    Case(
        name="some steps clipped",
        blocks=(eager(CPU), eager({**STRIDE_3, **WITHOUT_FORWARD_OVERLAP}), eager(RULES)),
        clip=1.12,
        steps=20,
        groups=TWO_BETAS,
    ),
    Case(name="beta powers over 60 steps", blocks=(STRIDE_3,), steps=60),
    Case(
        name="groups with two betas", thorough=True, blocks=(STRIDE_2, STREAMED), groups=TWO_BETAS, steps=55, clip=0.5
    ),
    Case(
        name="groups with betas a, b, a",
        blocks=(STRIDE_2, {**CPU, **WITHOUT_FORWARD_OVERLAP}, eager(CPU)),
        groups=(*TWO_BETAS, BASE_GROUP),
        steps=55,
    ),
    Case(
        name="betas changed by a scheduler",
        blocks=(STRIDE_2,),
        schedule=False,
        steps=20,
        clip=0.5,
        extra={
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 1e-4,
                    "cycle_max_lr": 3e-3,
                    "cycle_first_step_size": 6,
                    "cycle_min_mom": 0.85,
                    "cycle_max_mom": 0.95,
                },
            }
        },
    ),
    Case(
        name="accumulation managed by the caller",
        blocks=(STRIDE_2, eager(STREAMED), {**STREAMED, **WITHOUT_FORWARD_OVERLAP}),
        accumulation=3,
        clip=0.5,
        caller_accumulates=True,
    ),
    Case(
        name="reload in process, without the moments",
        blocks=(STRIDE_2, STREAMED, eager(CPU)),
        steps=12,
        reload=(5, 9),
        load_optimizer_states=False,
    ),
    Case(
        name="reload in process, one step after saving",
        blocks=(STRIDE_3, eager(STRIDE_3)),
        steps=20,
        reload=(11, 12),
        groups=TWO_BETAS,
    ),
    Case(
        name="inf and nan norm, clipping",
        blocks=({**STRIDE_2, **WITHOUT_BACKWARD_OVERLAP}, CPU, eager(CPU)),
        poisoned={3: INF, 5: NAN},
        clip=0.5,
    ),
    Case(
        name="inf and nan norm, no clipping, fp32",
        thorough=True,
        blocks=(STREAMED,),
        dtype="fp32",
        poisoned={3: INF, 5: NAN},
    ),
    Case(name="a parameter without any gradient", blocks=(STRIDE_2, eager(CPU)), unused=True, accumulation=3, clip=0.5),
    Case(
        name="zero.Init, shared host memory",
        blocks=(STRIDE_2, eager(CPU)),
        zero_init=True,
        groups=TWO_DECAYS,
        clip=0.5,
        shares_host_memory=True,
    ),
    Case(
        name="offloaded parameters",
        blocks=(STRIDE_OF_SUB_GROUPS, CPU, OFFLOADED_MIX, {**OFFLOADED_MIX, **SERIAL}, eager(CPU)),
        offload_param=True,
        clip=0.5,
    ),
    Case(
        name="2 ranks, fp32, offloaded parameters",
        blocks=(OFFLOADED_MIX, CPU, eager(OFFLOADED_MIX)),
        world_size=2,
        dtype="fp32",
        offload_param=True,
        accumulation=2,
        reload=(3, 5),
    ),
    Case(
        name="torch autocast",
        blocks=(STRIDE_2, eager(STRIDE_2)),
        dtype="fp32",
        extra={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ),
    Case(
        name="2 ranks, clipping, accumulation 3, two groups",
        blocks=(STRIDE_2, {**STRIDE_OF_SUB_GROUPS, **SERIAL}, CPU, eager(CPU)),
        world_size=2,
        clip=0.5,
        accumulation=3,
        groups=TWO_DECAYS,
    ),
    Case(
        name="2 ranks, gradients summed in fp32",
        blocks=(STRIDE_2, CPU, eager(CPU)),
        world_size=2,
        accumulation=3,
        clip=0.5,
        extra=IN_FP32,
    ),
    Case(
        name="2 ranks, ZeRO++ hpZ",
        blocks=(STRIDE_2, eager(STRIDE_2), {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}),
        world_size=2,
        clip=0.5,
        zero={"zero_hpz_partition_size": 2},
    ),
    Case(
        name="resume",
        thorough=True,
        blocks=({**STRIDE_2, **WITHOUT_BACKWARD_OVERLAP}, CPU, eager(CPU)),
        resume=True,
        steps=25,
        clip=0.5,
        groups=TWO_BETAS,
    ),
    Case(
        name="2 ranks, resume, fp16",
        blocks=(STRIDE_OF_SUB_GROUPS, eager(STRIDE_OF_SUB_GROUPS)),
        world_size=2,
        dtype="fp16",
        resume=True,
        poisoned={1: 1e6},
    ),
    replace(
        ON_DISK,
        name="states on disk",
        blocks=(ALL_ON_DISK, SOME_ON_DISK, {**SOME_ON_DISK, **SERIAL}, {"host_memory_gb": 0.0}),
    ),
    replace(
        ON_DISK,
        name="2 ranks, states on disk, bf16, accumulation 2, reload",
        blocks=({**ALL_ON_DISK, "nvme_paths": [tempfile.gettempdir()]}, SOME_ON_DISK),
        states="bf16",
        world_size=2,
        accumulation=2,
        reload=(2, 5),
        clip=0.5,
    ),
)

MISSING_GRADIENTS = Case(name="no gradient in some steps", blocks=(STRIDE_2, eager(CPU)), sometimes=True, clip=0.5)

DEPARTURES = (
    replace(MISSING_GRADIENTS, skips_sometimes=frozenset({3, 4, 6})),
    replace(
        MISSING_GRADIENTS,
        name="no gradient after an overflow, fp16",
        dtype="fp16",
        poisoned={3: 1e6},
        skips_sometimes=frozenset({4, 5}),
    ),
    replace(
        MISSING_GRADIENTS,
        name="2 ranks, no gradient in some steps and some micro-batches",
        world_size=2,
        accumulation=2,
        skips_sometimes=frozenset({4, 5, 9, 12}),
    ),
)
"""Cases without gradients in places, where stock reuses old ones: they are compared with stock on gradients of zero."""

QUICK = tuple(case for case in (*CASES, *DEPARTURES) if not case.thorough)
"""The cases of ``make test``, which have every feature on its own. They train on the GPU in software."""

NAMES_ON_CPU = {
    "every placement",
    "fp16, overflow, clipping",
    "some steps clipped",
    "beta powers over 60 steps",
    "states on disk",
    "2 ranks, clipping, accumulation 3, two groups",
}
assert {case.name for case in QUICK} >= NAMES_ON_CPU

ON_CPU = tuple(case for case in QUICK if case.shares_host_memory or case.name in NAMES_ON_CPU)
"""The cases that ``make test`` also trains on the CPU accelerator: memory that host and accelerator share, and a case
of each kind of state. ``make test-all`` trains the others there."""
