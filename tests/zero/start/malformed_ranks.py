"""Make engines with malformed blocks and profiles. Each must be refused by our own error, or accepted.

The arguments are a seed and the number of attempts, on one rank. Hypothesis draws the changes. There is one answer
for each attempt, and one for a training at the end, which must have the bits of stock.
"""

from __future__ import annotations

import copy
import json
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
from perf_model.presets.machines import MACHINES
from tests.fork_server import import_all
from tests.hypothesis_profiles import generated
from tests.launch import answer
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import differences, run_variant, shared_folder
from tests.zero.process_group import process_group
from tests.zero.start.attempts import config_with

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


PROFILE = json.loads(MACHINES["h100-pcie5"].profile(4).to_json())

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def changed(value: Any, data: st.DataObject) -> Any:
    """Return a copy of ``value`` in which one value somewhere is another one."""
    if not isinstance(value, (dict, list)) or not value or data.draw(st.integers(0, 4)) == 0:
        return data.draw(json_values)
    result = copy.copy(value)
    key = data.draw(st.sampled_from(sorted(result) if isinstance(result, dict) else range(len(result))))
    result[key] = changed(result[key], data)
    return result


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """Return ``content`` with some bytes replaced by others."""
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, min(len(content), begin + 20)))
    return content[:begin] + data.draw(st.binary(max_size=20)) + content[end:]


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
    if not message.replace("\n", "").isprintable() or len(message) > MAX_MESSAGE:
        problems.append(f"the error is long, or not printable: {printable(message[:200])}")
    return problems


def check(data: st.DataObject, path: Path) -> dict[str, Any]:
    """Make an engine with a block, or a profile, that Hypothesis changes. Return the answer."""
    if data.draw(st.booleans()):
        content = json.dumps(changed(PROFILE, data)).encode()
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
