"""Start ranks that hang in ``init_distributed``, and ranks that fail, and answer whether each is recognised as a hang.

The argument is a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fork_server import import_all
from tests.launch import answer
from tests.zero.checkpoints.killed_ranks import hung_in_init_distributed
from tests.zero.rank_group import Group

HANG_S = 5


def fail() -> None:
    raise RuntimeError("this work fails")


def main(folder: Path) -> None:
    import_all()
    hanging = Group(fail, 2, folder / "missing rank")
    hanging.kill_one(1)
    failing = Group(fail, 2, folder / "failing rank")
    answer(
        {
            "missing rank": hung_in_init_distributed(hanging.problem(HANG_S)),
            "failing rank": hung_in_init_distributed(failing.problem(timeout_s=100)),
        }
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
