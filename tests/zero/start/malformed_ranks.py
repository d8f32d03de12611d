"""Make engines with malformed blocks and profiles. Each must be refused by our own error, or accepted.

The arguments are a seed and the number of attempts, on one rank. Hypothesis draws the changes. There is one answer
for each attempt, and one for a training at the end, which must have the bits of stock.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from hypothesis import given, seed
from hypothesis import strategies as st

from deep_opt_states.config import Config
from deep_opt_states.zero.start import planning
from perf_model.json_input import printable
from tests.cli.test_bad_input import changed, damaged, dumped, is_clean, profile_json
from tests.fork_server import import_all
from tests.hypothesis_profiles import generated
from tests.launch import answer
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import differences, run_variant, shared_folder
from tests.zero.process_group import process_group
from tests.zero.start.refusal_ranks import config_with

WIDTH = 6
MAX_MESSAGE = 4_000
OUR_PACKAGES = ("deep_opt_states", "perf_model")

VALID = {
    "enabled": True,
    "placement": "stride",
    "update_stride": 2,
    "unit_size": 7,
    "num_slots": 2,
    "cpu_threads": 1,
    "bind_cores": False,
    "gpu_memory_gb": 1.0,
    "gpu_memory_margin_gb": 0.5,
    "overlap_backward": True,
    "overlap_forward": True,
}
RULES = [{"match": ["*.weight"], "states": "cpu"}, {"match": "*", "states": "streamed"}]


def attempt(block: object) -> dict[str, Any]:
    """Make an engine with the block. Return its error or "accepted", and the problems."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    config = config_with({"deep_optimizer_states": block})
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except Exception as error:  # noqa: BLE001 (any error that is not ours is a problem)
        found = {"type": type(error).__name__, "message": str(error)}
        return {**found, "problems": problems_of(error)}
    engine.destroy()
    return {"type": "accepted", "message": "", "problems": []}


def problems_of(error: Exception) -> list[str]:
    """Return the problems of an error that refuses a block or a profile."""
    message = str(error)
    problems = []
    if type(error).__module__.partition(".")[0] not in OUR_PACKAGES:
        problems.append(f"the error is not ours: {type(error).__module__}.{type(error).__name__}: {message}")
    if "found" not in message or not (message.count("\n") or message.count(". ")):
        problems.append(f"the error is not a rule, a value and a remedy: {message}")
    if not is_clean(message) or len(message) > MAX_MESSAGE:
        problems.append(f"the error is long, or not printable: {printable(message[:200])}")
    return problems


def check(data: st.DataObject, path: Path) -> dict[str, Any]:
    """Make an engine with a block, or a profile, that Hypothesis changes. Return the answer."""
    if data.draw(st.booleans()):
        content = dumped(changed(profile_json(), data))
        if data.draw(st.booleans()):
            content = damaged(content, data)
        path.write_bytes(content)
        found = {"kind": "profile", **attempt({"placement": "planned", "profile": str(path)})}
        if path.read_bytes() != content:
            found["problems"].append("the profile has changed")
        return found
    valid: dict[str, Any] = VALID if data.draw(st.booleans()) else {"placement": RULES}
    return {"kind": "block", **attempt(changed(valid, data))}


def main(first_seed: int, count: int) -> None:
    assert set(VALID) <= set(Config.model_fields)
    with shared_folder() as folder:

        @generated(count)
        @seed(first_seed)
        @given(st.data())
        def check_each(data: st.DataObject) -> None:
            answer(check(data, folder / "profile.json"))

        threads = threading.active_count()
        # The profile is one of a machine with a GPU.
        with mock.patch.object(planning, "_refuse_other_machine"):
            check_each()
        problems = [] if threading.active_count() == threads else ["threads are left"]
    # In the same process, in which all of these engines were refused or destroyed.
    case = Case(name="after malformed configs", blocks=(STRIDE_2,), steps=3)
    problems += differences(run_variant(case, None), run_variant(case, STRIDE_2))
    answer({"kind": "training at the end", "type": "trained", "message": "", "problems": problems})


if __name__ == "__main__":
    import_all()
    with process_group():
        main(int(sys.argv[1]), int(sys.argv[2]))
