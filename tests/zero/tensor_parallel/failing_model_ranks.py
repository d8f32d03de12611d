"""Let rank 1's update fail beside tensor parallelism: every rank stops, and all recover from a checkpoint.

Argument: the layout. With four ranks, rank 1 shares a model with rank 0, and a shard with rank 3.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.zero.failures.test_failures import failing_update, must_raise_everywhere, must_refuse
from tests.zero.parity.case import STRIDE_2, WITHOUT_FORWARD_OVERLAP
from tests.zero.parity.training import differences, shared_folder
from tests.zero.process_group import process_group
from tests.zero.tensor_parallel.cases import TensorParallelCase
from tests.zero.tensor_parallel.layouts import SharedModel, layouts
from tests.zero.tensor_parallel.tensor_parallel_ranks import closing_engine_of, tokens_of, train


def step(engine: Any) -> None:
    engine.backward(engine(tokens_of(99)))
    engine.step()


def stops_and_recovers(case: TensorParallelCase, layout: SharedModel, folder: Path, *, deferred: bool) -> None:
    """Check a failure in ``step()``, or of an update that is in flight during the next forward."""
    block = STRIDE_2 if deferred else {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}
    with closing_engine_of(case, layout, block) as engine:
        train(engine, case, layout, 2)
        engine.save_checkpoint(str(folder))
        step(engine)
        with failing_update(engine, "cpu"):
            if deferred:
                step(engine)
            must_raise_everywhere(lambda: step(engine))
        must_refuse(step, engine)
        must_refuse(engine.save_checkpoint, str(folder / "inconsistent"))
        engine.load_checkpoint(str(folder))
        found = train(engine, case, layout, 2)
    with closing_engine_of(case, layout, None) as engine:
        engine.load_checkpoint(str(folder))
        assert differences(train(engine, case, layout, 2), found) == []


def main(name: str) -> None:
    layout = layouts()[name]
    for deferred in (False, True):
        with shared_folder() as folder:
            case = TensorParallelCase(name, "bf16", "clipping", zero_init=False)
            stops_and_recovers(case, layout, folder, deferred=deferred)
    print("all ranks stopped and recovered")


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
