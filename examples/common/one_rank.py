"""Train without a launcher."""

from __future__ import annotations

import os
import socket


def be_the_only_rank_unless_launched() -> None:
    """Set the environment variables of a launcher for one rank, if no launcher has set them.

    Without them, DeepSpeed would look for MPI.
    """
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def do_not_build_shared_memory_collectives() -> None:
    """Keep DeepSpeed from building its kernel for collectives in shared memory, which one rank does not need.

    Its buffer of 66 MB in /dev/shm is then not allocated either. DeepSpeed never frees it.
    """
    # Importing DeepSpeed takes seconds and chooses the accelerator: callers set the environment before.
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
