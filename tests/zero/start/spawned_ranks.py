"""Train in two children of the start method ``spawn``, whose parent imports neither torch nor DeepSpeed."""

from __future__ import annotations

import multiprocessing
import os
import sys

WORLD_SIZE = 2


def rank(number: int, config: str) -> None:
    size = str(WORLD_SIZE)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=size, LOCAL_SIZE=size)
    from tests.zero.start.plain_script import train

    train(config)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=rank, args=(number, sys.argv[1])) for number in range(WORLD_SIZE)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(max(abs(child.exitcode or 0) for child in children))
