"""Let the memory that training needs grow by values and not by the size of inputs; print what the plugin has done.

Argument: the name of a growth, see ``GROWTH``. There is one answer for the training, and one for each fault.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from deep_opt_states.device.cuda import AllocatorWatch
from deep_opt_states.zero.step.gpu_memory import GpuBudget, GpuMemory
from tests.software_gpu.filled_gpu.filled_gpu_ranks import compare
from tests.software_gpu.filled_gpu.growing_inputs import BYTES_PER_TOKEN, CASE, Step
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.case import Case

MEMORY_MIB = 272
"""The memory of the GPU. Stock leaves about 140 MiB of it free, and all states take less."""

TOKENS = 16_000
"""The tokens of each micro-batch. Only their distribution over the experts changes."""

BALANCED = Step((TOKENS,), busiest=64)

WIDE_MARGIN_MIB, NARROW_MARGIN_MIB = 64, 4


WIDTHS = (64, 3000, 3000, 64)


def case(growth: GrowthByValues) -> Case:
    """Return the case with the margin and the widths of ``growth``."""
    block = {**CASE.blocks[0], "gpu_memory_margin_gb": growth.margin_mib * 2**20 / 1e9}
    return replace(CASE, blocks=(block,), widths=growth.widths)


def unbalanced(mib: int, *, in_backward: bool = False) -> Step:
    """Return a step whose layers keep so much memory each, or need it one after the other in backward."""
    return Step((TOKENS,), busiest=mib * 2**20 // BYTES_PER_TOKEN, in_backward=in_backward)


@dataclass(frozen=True)
class GrowthByValues:
    """Steps that follow the balanced ones, on a GPU with so much memory.

    ``fault`` is what is replaced so that the same steps run out of memory.
    """

    steps: list[Step]
    margin_mib: int
    memory_mib: int = MEMORY_MIB
    widths: tuple[int, ...] = WIDTHS
    tries_again: bool = False
    fault: tuple[tuple[type, str, Any], ...] = ()


NOT_NOTICED = (
    (GpuMemory, "has_failed", False),
    # What the failed attempt has gathered is in use when the next one begins.
    (AllocatorWatch, "bytes_in_use", lambda _: 0),
)

GROWTH = {
    "within the margin": GrowthByValues([unbalanced(56, in_backward=True)] * 2, WIDE_MARGIN_MIB),
    "in small steps": GrowthByValues(
        [unbalanced(mib, in_backward=True) for mib in range(26, 131, 26)],
        WIDE_MARGIN_MIB,
        fault=((GpuBudget, "limit", lambda *_: None),),
    ),
    "from layer to layer": GrowthByValues(
        # Six small layers follow the large ones, which need most memory in backward.
        [unbalanced(25)] * 2,
        WIDE_MARGIN_MIB,
        MEMORY_MIB + 40,
        (*WIDTHS, *[64] * 6),
        fault=((GpuMemory, "is_short_now", lambda _: False),),
    ),
    "at once in forward": GrowthByValues([unbalanced(46)] * 2, NARROW_MARGIN_MIB, tries_again=True, fault=NOT_NOTICED),
    "at once in backward": GrowthByValues(
        [unbalanced(110, in_backward=True)] * 2, NARROW_MARGIN_MIB, tries_again=True, fault=NOT_NOTICED
    ),
}


def main(name: str) -> None:
    growth = GROWTH[name]
    steps = [*[BALANCED] * 8, *growth.steps, *[BALANCED] * 2]
    memory_bytes, trained = growth.memory_mib * 2**20, case(growth)
    compare(name, steps, memory_bytes, case=trained, tries_again=growth.tries_again)
    if growth.fault:
        with ExitStack() as faults:
            for patched in growth.fault:
                faults.enter_context(mock.patch.object(*patched))
            compare("fault", steps, memory_bytes, case=trained, tries_again=growth.tries_again)


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1])
