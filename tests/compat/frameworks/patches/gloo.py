"""Connect the ranks by Gloo before Accelerate looks for them: otherwise it treats each rank as the only one on the CPU.

This is so with stock DeepSpeed, too.
"""

import os

import wrapt

if "RANK" in os.environ:

    @wrapt.when_imported("accelerate")
    def connect(module: object) -> None:
        """Create the process group that Accelerate finds."""
        import deepspeed

        deepspeed.init_distributed("gloo")
