"""Which device trains in the benchmarks?"""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator


def trains_on_gpu() -> bool:
    """Return whether DeepSpeed's accelerator is a GPU: with ``DS_ACCELERATOR=cpu``, a machine with one may not."""
    return bool(get_accelerator().device_name() == "cuda")
