"""Train with stock and with the plugin, with the ``OMP_NUM_THREADS`` of a fresh interpreter."""

from __future__ import annotations

from tests.drills.drill_ranks import compare
from tests.zero.parity.case import STRIDE_2
from tests.zero.process_group import process_group

if __name__ == "__main__":
    with process_group():
        compare(STRIDE_2)
