"""DeepSpeed never removes the shared memory of its collectives on the CPU: 69 MB per rank stay in use.

``shared_close`` in ``shm.cpp`` has no caller. With another port, the next run adds memory of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import deepspeed

if __name__ == "__main__":
    if "child" in sys.argv:
        deepspeed.init_distributed()
        deepspeed.comm.destroy_process_group()
        sys.exit()
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_0"
    file = Path("/dev/shm", name)
    file.unlink(missing_ok=True)
    subprocess.run([sys.executable, __file__, "child"], check=True)
    print(f"the rank has ended; {file.stat().st_size} bytes remain in {file}")
    file.unlink()
