"""A rank that is lost inside init_distributed leaves the other one waiting without limit, whatever the timeout is.

The ranks wait for its shared memory in ``csrc/cpu/comm/shm.cpp``, line 400, and load a core fully.
"""

import faulthandler
import os
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch.distributed
from deepspeed.comm.torch import build_shm_op

TIMEOUT_S = 10

if __name__ == "__main__":
    build_shm_op()  # compiled at first use
    if os.environ["RANK"] == "1":
        # The ranks meet here, as in DeepSpeed's function. This one ends before it makes its shared memory.
        torch.distributed.init_process_group("gloo")
        time.sleep(TIMEOUT_S / 2)
        os._exit(0)  # With another exit code, the launcher would also end rank 0.
    # DeepSpeed never removes the shared memory of earlier runs.
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{os.environ['MASTER_PORT']}_1"):
        path.unlink()
    faulthandler.dump_traceback_later(3 * TIMEOUT_S, exit=True)
    deepspeed.init_distributed(timeout=timedelta(seconds=TIMEOUT_S))
