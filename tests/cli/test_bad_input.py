"""Refuse bad input: one short error with the rule, the value found and the remedy, and no traceback."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.json_input import MAX_FILE_BYTES, parse_json, printable, shorten
from perf_model.presets.machines import MACHINES
from tests.cli.planning import LLAMA, job
from tests.launch import REPOSITORY

FEW_UNITS = ["--unit-size", "1000000000"]
SWEEP = ["--ranks-per-node", "4", "--sequence", "2048", "--world-sizes", "4", "--micro-batches", "1"]
CLUSTER_SIZES = ["--gpus", "8", "--ranks-per-node", "4", "--global-batch", "16", "--sequence", "2048"]
ONE_LAYOUT = ["--tensor-parallel", "1", "--micro-batches", "1", *FEW_UNITS]
CLUSTER = ["cluster", *job()[:4], *CLUSTER_SIZES, *ONE_LAYOUT]


def cluster(option: str, value: object) -> list[str]:
    """Return a command with a bad value; of several, argparse takes the last."""
    return [*CLUSTER, option, str(value)]


@dataclass(frozen=True)
class Screen:
    """The output of a command: its exit code, stdout and stderr."""

    code: int
    out: str
    error: str


def run_command(arguments: list[str]) -> Screen:
    """Run a planning command in this process. An exception that is not an exit fails the test."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(arguments)
        except SystemExit as exit_request:
            code = int(exit_request.code or 0)
    return Screen(code, out.getvalue(), error.getvalue())


def assert_refused(screen: Screen, expected: str = "") -> None:
    """Check the exit code, and that the error is short and states a rule, the value found and a remedy."""
    assert screen.code == 2, screen
    assert expected in screen.error
    assert len(screen.error) < 4_000
    lines = screen.error.rstrip("\n").split("\n")
    assert 2 <= len(lines) <= 3, "the rule with the value, and the remedy"
    assert any(
        word in screen.error for word in ("found", "expected", "required", "unrecognized", "invalid", "not allowed")
    )
    assert not any(line.startswith("usage:") for line in lines)


def profile_json(**changes: Any) -> bytes:
    return dumped({**json.loads(MACHINES["h100-pcie5"].profile(4).to_json()), **changes})


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


ANY_FILE: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "half a string": b'{"name": "',
    "number": b"3",
    "null": b"null",
    "byte order mark": b"\xef\xbb\xbf{}",
    "list": b"[1]",
    "key twice": b'{"version": 2, "version": 2}',
    "larger than 10 MB": b" " * (MAX_FILE_BYTES + 1),
}
"""Files that are neither a profile, nor a config, nor rules."""

FILES: dict[str, dict[str, bytes]] = {
    "profile": {
        **ANY_FILE,
        "other version": profile_json(version=1),
        "GB instead of bytes": profile_json(gpu_memory_bytes=80),
        "negative memory": profile_json(host_memory_bytes=-1),
        "unknown key": profile_json(gpu_memory=80e9),
        "no measurements": profile_json(measurements={}),
        "samples are text": profile_json(measurements={"h2d_bytes_per_s": {"samples": ["fast"]}}),
        "a config.json": dumped(LLAMA),
    },
    "model": {
        **ANY_FILE,
        "negative layers": dumped({**LLAMA, "num_hidden_layers": -1}),
        "width is text": dumped({**LLAMA, "hidden_size": "4096"}),
        "heads do not divide": dumped({**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 7}),
        "a profile": profile_json(),
    },
    "rules": {
        **ANY_FILE,
        "no rule": dumped([]),
        "unknown key": dumped([{"match": "*", "states": "cpu", "unit": 1}]),
        "no states": dumped([{"match": "*"}]),
        "other states": dumped([{"match": "*", "states": "fast"}]),
        "pattern is empty": dumped([{"match": "", "states": "cpu"}]),
        "pattern matches nothing": dumped([{"match": "lm_heads", "states": "cpu"}]),
        "rule without effect": dumped([{"match": "*", "states": "cpu"}, {"match": "lm_head.*", "states": "cpu"}]),
        "an object": dumped({"match": "*", "states": "cpu"}),
    },
}

PARAMS = [*job()[:2], *job()[4:], "--params"]

OPTIONS: dict[str, list[str]] = {
    "unknown command": ["plans"],
    "no options": ["plan"],
    "unknown option": ["plan", *job(), "--batch", "1"],
    "world size is text": ["plan", *job(world_size="four")],
    "micro-batch 0": ["plan", *job(micro_batch=0)],
    "overlap": ["plan", *job(overlap="all")],
    "sub-group size of 25 digits": ["plan", *job(sub_group_size=10**24)],
    "profile is a folder": ["plan", *job(profile=REPOSITORY)],
    "model is a folder": ["plan", *job(model=REPOSITORY)],
    "model is empty": ["plan", *job(model="")],
    "model and parameters": ["plan", *job(), "--params", "32e9"],
    "layers without parameters": ["plan", *job(), "--layers", "3"],
    "parameters have a unit": ["plan", *PARAMS, "32GB"],
    "parameters are a fraction": ["plan", *PARAMS, "1e8.5"],
    "few parameters": ["plan", *PARAMS, "7"],
    "parameters for these layers": ["plan", *PARAMS, "1e9", "--layers", "90", "--hidden", "9000"],
    "world sizes": ["sweep", *job()[:4], *SWEEP[:4], "--world-sizes", "1,,2", "--micro-batches", "1"],
    "csv in no folder": ["sweep", *job()[:4], *SWEEP, *FEW_UNITS, "--csv", "none/rows.csv"],
    "output below a device": ["plan", *job(timeline="/dev/null/trace.json", unit_size=10**9)],
    "cluster without options": ["cluster"],
    "cluster without sizes": CLUSTER[:5],
    "cluster and accumulation": cluster("--accumulation", 2),
    "tokens are nan": cluster("--tokens", "nan"),
    "tokens are negative": cluster("--tokens", -1),
    "no tokens": cluster("--tokens", 0),
    "tensor-parallel sizes": cluster("--tensor-parallel", "1,,2"),
    "micro-batches": cluster("--micro-batches", "auto,1"),
    "network inside a node is text": cluster("--node-gb-per-s", "fast"),
    "cluster with the profile of a folder": cluster("--profile", REPOSITORY),
}


@pytest.mark.parametrize(
    ("option", "name", "content"),
    [(option, name, content) for option, files in FILES.items() for name, content in files.items()],
    ids=[f"{option}: {name}" for option, files in FILES.items() for name in files],
)
def test_a_file_that_cannot_be_used_gets_one_short_error(
    option: str, name: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    for arguments in (["plan", *job()], CLUSTER):
        assert_refused(run_command([*arguments, f"--{option}", str(path)]))


@pytest.mark.parametrize("arguments", OPTIONS.values(), ids=OPTIONS)
def test_impossible_options_get_one_short_error(arguments: list[str]) -> None:
    assert_refused(run_command(arguments))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"profile": "none.json"}, "A profile must be a readable file, found none.json"),
        ({"model": "none.json"}, "A model must be a preset or a readable config.json, found none.json"),
        ({"world_size": 0}, "world_size: must be an integer from 1 to 1,000,000, found 0"),
        ({"world_size": 10**12}, "world_size: must be an integer from 1 to 1,000,000, found 1000000000000"),
        ({"ranks_per_node": 10**12}, "ranks_per_node: must be an integer from 1 to 1,000,000"),
        ({"micro_batch": 10**12}, "micro_batch: must be an integer from 1 to 1,000,000"),
        ({"sequence": 99999999999999999999}, "sequence: must be an integer from 1 to 10,000,000"),
        (
            {"world_size": 2000, "ranks_per_node": 1000},
            "ranks_per_node: must be at most 96, the number of cores of h100-pcie5",
        ),
        ({"profile": "long" * 500}, "A profile must be a readable file"),
        ({"profile": "\0"}, "A profile must be a readable file"),
        ({"model": "long" * 500}, "A model must be a preset or a readable config.json"),
        ({"world_size": 6}, "ranks_per_node: must divide the world size, 6, found 4"),
        ({"sequence": -1}, "sequence: must be an integer from 1 to 10,000,000, found -1"),
        ({"sub_group_size": 0}, "sub_group_size: must be an integer from 1 to 1,000,000,000,000,000, found 0"),
        ({"unit_size": 0}, "unit_size: must be an integer from 1 to 1,000,000,000,000,000, found 0"),
        ({"rules": "none.json"}, "--rules: must be a readable file with a JSON list, found none.json: "),
    ],
)
def test_a_bad_value_is_refused_with_rule_value_and_remedy(changes: dict[str, Any], expected: str) -> None:
    screen = run_command(["plan", *job(**changes)])
    assert_refused(screen)
    assert screen.error.startswith(expected)


def test_an_error_says_that_a_key_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-1] + ', "hidden_size": 8192}')
    assert_refused(run_command(["plan", *job(model=path)]), "the key 'hidden_size' occurs twice in one object")


def test_a_file_of_the_largest_size_is_read_and_a_larger_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(LLAMA)
    path.write_text(text.ljust(MAX_FILE_BYTES))
    assert run_command(["plan", *job(model=path), *FEW_UNITS]).code == 0
    path.write_text(text.ljust(MAX_FILE_BYTES + 1))
    assert_refused(run_command(["plan", *job(model=path)]), "it has more than 10 MB")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.text())
def test_a_printable_text_is_in_one_line_and_is_unchanged_if_it_was(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


@given(json_values)
def test_a_shortened_value_is_short_and_printable(value: Any) -> None:
    assert shorten(value).isprintable()
    assert len(shorten(value)) < 3_000


@given(json_values)
def test_json_without_repeated_keys_is_parsed_as_usual(value: Any) -> None:
    assert repr(parse_json(json.dumps(value))) == repr(json.loads(json.dumps(value)))
