"""One rank: trains every case of its world size, both arms, and writes what differs.

Started by ``launch.py``; several cases a process, since importing DeepSpeed is the slow part.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.zero.parity.arm import differences, run_arm
from tests.zero.parity.cases import CASES


def main(result_path: str) -> None:
    # The CPU accelerator trains fp16, but says that it does not.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed()
    results = {}
    for case in CASES:
        if case.world_size != dist.get_world_size():
            continue
        try:
            stock = run_arm(case, None)
            arms = [run_arm(case, block) for block in case.blocks]
        except Exception:
            results[case.name] = {"error": traceback.format_exc()}
            break
        results[case.name] = {
            "numbers": stock.numbers,
            "classes": [arm.optimizer_class for arm in (stock, *arms)],
            "differences": [differences(stock, arm) for arm in arms],
        }
    Path(f"{result_path}.{dist.get_rank()}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
