"""Train golden cases on one rank with this environment's DeepSpeed and PyTorch, and write how they compare with stock.

Arguments: the path of the results, to which the rank is appended, and the names of the cases. At one rank, an exception
ends its case only. At several ranks it ends all, because the collectives of the ranks no longer match.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from deep_opt_states.config import Unsupported
from deep_opt_states.zero.internals.private_names import missing_names
from deep_opt_states.zero.internals.releases import is_at_least
from tests.compat.golden import EQUAL, EQUAL_BUT_NAN, NORM_IS_CHECKED_SINCE, SINCE, refused
from tests.zero.parity import training
from tests.zero.parity.case import Case
from tests.zero.parity.cases import CASES
from tests.zero.parity.training import collect, make_engine, same_as_stock
from tests.zero.process_group import process_group


def differences(case: Case) -> list[str]:
    return [f"{block}: {line}" for block, lines in same_as_stock(case)["differences"].items() for line in lines]


def collect_with_one_nan(optimizer: Any, record: training.Record) -> None:
    """Record what ``collect`` does, with the same bits for every NaN."""
    collect(optimizer, record)
    for name, tensor in record.tensors.items():
        record.tensors[name] = tensor.masked_fill(tensor.isnan(), torch.nan)


def compare(name: str) -> list[str]:
    """Return ``EQUAL``, ``EQUAL_BUT_NAN``, ``refused(since)``, or a line for each value that is not stock's."""
    (case,) = (case for case in CASES if case.name == name)
    since = SINCE.get(name, "0")
    if not is_at_least(deepspeed.__version__, NORM_IS_CHECKED_SINCE.get(name, "0")):
        with mock.patch.object(training, "collect", collect_with_one_nan):
            return differences(case) or EQUAL_BUT_NAN
    if is_at_least(deepspeed.__version__, since):
        return differences(case) or EQUAL
    try:
        make_engine(case, case.blocks[0])
    except Unsupported as refusal:
        if since in str(refusal):
            return refused(since)
        raise
    return [f"accepted, but DeepSpeed has this since {since} only"]


def main(path: str, *names: str) -> None:
    cases: dict[str, list[str]] = {}
    for name in names:
        try:
            cases[name] = compare(name)
        except Exception as error:  # noqa: BLE001 (part of the result)
            traceback.print_exc()
            cases[name] = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
            if dist.get_world_size() > 1:
                break
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "python": platform.python_version()}
    # Training looks for missing names in untested releases only; those between two tried ones lack the same.
    results = {"versions": versions, "missing_names": missing_names(), "cases": cases}
    Path(f"{path}.{dist.get_rank()}").write_text(json.dumps(results))


if __name__ == "__main__":
    if os.environ["WORLD_SIZE"] == "1":
        # One rank does not use DeepSpeed's collectives in shared memory, which take a minute to compile. An import
        # statement would give torch itself, since ``deepspeed.comm`` has that under the same name.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    with process_group():
        main(*sys.argv[1:])
