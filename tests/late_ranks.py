"""Gather values of two ranks, of which rank 1 comes once rank 0 has logged that it is missing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from deep_opt_states import log, waiting
from deep_opt_states.profiler.ranks import launched_ranks
from deep_opt_states.zero.start.node_share import SharingRanks
from tests.launch import answer


def main(marker: Path) -> None:
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        marker.touch()

    waiting.FIRST_S = 0.1
    log.warn_this_rank = tell
    with launched_ranks(os.environ) as ranks:
        while ranks.rank == 1 and not marker.exists():
            time.sleep(0.01)
        SharingRanks.gather(ranks)
        if ranks.rank == 0:
            answer(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
