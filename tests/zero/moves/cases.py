"""List the cases in which units move."""

from __future__ import annotations

from tests.zero.parity.case import CPU, SERIAL, STRIDE_2, WITHOUT_BACKWARD_OVERLAP, Case, ParamGroup

TWO_GROUPS = (ParamGroup(), ParamGroup(lr=1e-3, weight_decay=0.2))

CASES = (
    Case(name="bf16, clipping, reload", blocks=(CPU,), steps=40, clip=0.5, reload=(11, 17)),
    Case(
        name="fp16, overflows, accumulation 2", blocks=(CPU,), dtype="fp16", steps=16, accumulation=2, poisoned={3: 1e6}
    ),
    Case(name="fp32, two groups, serial", blocks=({**CPU, **SERIAL},), dtype="fp32", steps=30, groups=TWO_GROUPS),
    Case(name="missing gradients", blocks=(CPU,), steps=16, sometimes=True, unused=True, frozen=True),
    Case(name="from and to checkpoints of stock", blocks=(CPU,), steps=8, clip=0.5, resume=True),
    Case(name="offloaded parameters", blocks=(CPU,), steps=16, offload_param=True),
    Case(name="shared host memory", blocks=(CPU,), steps=16, shares_host_memory=True),
    Case(
        name="2 ranks, accumulation 3, clipping",
        blocks=({**CPU, **WITHOUT_BACKWARD_OVERLAP},),
        world_size=2,
        steps=16,
        accumulation=3,
        clip=0.5,
    ),
    Case(
        name="2 ranks, fp16, from and to checkpoints of stock", blocks=(CPU,), world_size=2, dtype="fp16", resume=True
    ),
    Case(name="3 ranks, two groups", blocks=(CPU,), world_size=3, steps=16, groups=TWO_GROUPS, clip=0.5),
    Case(name="3 ranks, from and to checkpoints of stock", blocks=(CPU,), world_size=3, clip=0.5, resume=True),
)
"""Cases in which random units move after random steps."""

MOVED_OFTEN = (
    Case(
        name="offloaded parameters, accumulation 2, moves after each of 20 steps",
        blocks=(CPU,),
        steps=20,
        accumulation=2,
        clip=0.5,
        offload_param=True,
        reload=(9, 12),
    ),
    *(
        Case(
            name=f"{world_size} ranks, moves after each of {steps} steps",
            blocks=(CPU,),
            world_size=world_size,
            steps=steps,
            clip=0.5,
            reload=(steps // 2, steps // 2 + 5),
            # Wider layers are cut in more places.
            widths=(19, 90, 120, 90, 23),
            sub_group_size=6000,
        )
        for world_size, steps in ((2, 50), (3, 70))
    ),
)
"""Cases in which random units move after every step. They are short for their number of moves."""

ACCESSED = (
    Case(name="accesses after moves", blocks=(STRIDE_2,), steps=20, clip=0.5),
    Case(name="accesses after moves, fp32, accumulation 2", blocks=(CPU,), steps=12, dtype="fp32", accumulation=2),
    Case(name="2 ranks, accesses after moves", blocks=({**CPU, **SERIAL},), world_size=2, steps=16, accumulation=2),
    Case(name="3 ranks, accesses after moves, fp16", blocks=(STRIDE_2,), world_size=3, steps=20, dtype="fp16"),
)
"""Cases in which units move after every step, and the user reads states and sets gradients right after that."""
