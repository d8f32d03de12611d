"""Train through an overflow on one rank of a model, then again with a seeded fault, and answer with what happens.

The fault is that no rank reduces its overflow over the ranks that share its model. The rank with the overflow then
skips the step, and the other one waits for it in the reduction of the norm. A thread watches each rank, answers with
the functions in which it has been waiting for ``STUCK_S``, and ends it. Gloo ends a rank itself if it receives the data
of another collective.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator

from deep_opt_states.zero.step import norms
from tests.fork_server import import_all
from tests.launch import answer
from tests.zero.parity.training import differences
from tests.zero.process_group import process_group
from tests.zero.tensor_parallel.cases import PLACEMENTS, TensorParallelCase
from tests.zero.tensor_parallel.layouts import layouts
from tests.zero.tensor_parallel.tensor_parallel_ranks import run

CASE = TensorParallelCase("mpu", "fp16", "plain", zero_init=False)
STUCK_S = 10
"""How long a rank is at the same instruction before it is ended. Its steps take milliseconds."""


def end_if_stuck(ident: int) -> None:
    """End this process when the thread ``ident`` has been at the same instruction for ``STUCK_S`` seconds."""
    last: list[Any] = []
    since_s = time.monotonic()
    while True:
        time.sleep(0.5)
        frames = [
            (frame.f_code.co_name, frame.f_lasti) for frame, _ in traceback.walk_stack(sys._current_frames()[ident])
        ]
        if frames != last:
            last, since_s = frames, time.monotonic()
        elif time.monotonic() - since_s > STUCK_S:
            answer({"stuck in": [name for name, _ in frames]})
            os._exit(1)


def main() -> None:
    get_accelerator().is_fp16_supported = lambda: True
    layout = layouts()[CASE.layout]
    stock = run(CASE, layout, None)
    answer({"without the fault": differences(stock, run(CASE, layout, PLACEMENTS["cpu"]))})
    threading.Thread(target=end_if_stuck, args=[threading.get_ident()], daemon=True).start()
    with mock.patch.object(norms, "model_parallel_all_reduce"):
        answer({"with the fault": differences(stock, run(CASE, layout, PLACEMENTS["cpu"]))})


if __name__ == "__main__":
    import_all()
    with process_group():
        main()
