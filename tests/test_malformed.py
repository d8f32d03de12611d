"""Check that every reader refuses malformed input by an error of our own: the rule, the value found, and the remedy.

Damaged checkpoints are in ``tests/zero/checkpoints/test_malformed.py``, since only an engine reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deep_opt_states.config import ConfigError, parse_config
from deep_opt_states.profiler import cache
from perf_model.__main__ import main
from perf_model.json_input import MAX_FILE_BYTES
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.presets.machines import MACHINES
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.model import ModelError

MAX_MESSAGE = 4_000

BLOCK: dict[str, Any] = {
    "enabled": True,
    "placement": [{"match": ["*.weight"], "states": "cpu"}, {"match": "*", "states": "streamed"}],
    "unit_size": 7,
    "num_slots": 2,
    "cpu_threads": 1,
    "bind_cores": False,
    "gpu_memory_gb": 1.0,
    "overlap_backward": True,
}
PROFILE: dict[str, Any] = json.loads(MACHINES["h100-pcie5"].profile(4).to_json())
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}

OTHER_VALUES: dict[str, object] = {
    "nothing": None,
    "a truth value": True,
    "a negative number": -1,
    "a huge number": 10**400,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "a control character": "\x1b[31m\n",
    "a long text": "x" * 100_000,
    "a list": [[]],
    "an object": {"a": {}},
}
FILES: dict[str, bytes | None] = {
    "no file": None,
    "an empty file": b"",
    "half of an object": b'{"version": 2, ',
    "another type": b"[]",
    "a deep list": b"[" * 100_000,
    "a repeated key": b'{"version": 2, "version": 2}',
    "bytes that are no text": b"\xff\xfe\x00{",
    "NUL": b"\0" * 1000,
    "a large file": b" " * (MAX_FILE_BYTES + 1),
}


def with_other_values(valid: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield copies of ``valid`` without each key, with an unknown key, and with every other value at every key."""
    yield "an unknown key", {**valid, "\x1b": 1}
    for key in valid:
        yield f"no {key}", {other: value for other, value in valid.items() if other != key}
        for name, value in OTHER_VALUES.items():
            yield f"{name} at {key}", {**valid, key: value}


def files_of(valid: dict[str, Any]) -> dict[str, bytes | None]:
    return FILES | {name: json.dumps(found).encode() for name, found in with_other_values(valid)}


READERS: dict[str, tuple[Callable[[Path], object], type[ValueError], dict[str, bytes | None]]] = {
    "profile": (HardwareProfile.read, ProfileError, files_of(PROFILE)),
    "config.json of a model": (read_hf_config, ModelError, files_of(MODEL)),
}


def refusal(read: Callable[[], object], error: type[ValueError]) -> str:
    """Return the message with which the input is refused, or "" if it is used. No other error may be raised."""
    try:
        read()
    except error as found:
        return str(found)
    return ""


def problems_of(message: str) -> list[str]:
    """Return the parts that a message lacks: a rule with the value found, and a remedy, both short and printable."""
    problems = []
    if message and ("found" not in message or not (message.count("\n") or message.count(". "))):
        problems.append(f"it is not a rule, a value and a remedy: {message}")
    if not message.replace("\n", "").isprintable() or len(message) > MAX_MESSAGE:
        problems.append(f"it is long, or not printable: {message[:200]!r}")
    return problems


@pytest.mark.promise("P6")
@pytest.mark.parametrize("name", READERS)
def test_a_malformed_file_is_refused_with_the_rule_the_value_and_the_remedy(name: str, tmp_path: Path) -> None:
    read, error, contents = READERS[name]
    path, messages = tmp_path / "given.json", {}
    for damage, content in contents.items():
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        messages[damage] = refusal(lambda: read(path), error)
        assert content is None or path.read_bytes() == content, damage
    assert {damage: found for damage, text in messages.items() if (found := problems_of(text))} == {}
    assert [damage for damage in FILES if not messages[damage]] == []
    assert sum(map(bool, messages.values())) > len(messages) / 2


@pytest.mark.promise("P6")
def test_a_malformed_block_is_refused_with_the_rule_the_value_and_the_remedy() -> None:
    blocks = {"a word": "planned", "a list": [], **dict(with_other_values(BLOCK))}
    messages = {
        damage: refusal(lambda block=block: parse_config({"deep_optimizer_states": block}), ConfigError)
        for damage, block in blocks.items()
    }
    assert {damage: found for damage, text in messages.items() if (found := problems_of(text))} == {}
    assert sum(map(bool, messages.values())) > len(messages) / 2


@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_a_malformed_cached_profile_is_as_none(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "cached.json"
    if content is not None:
        path.write_bytes(content)
    assert cache._read(path) is None


@pytest.mark.promise("P6")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((["--profile", name, "--model", "13B"], "profile") for name in ("none.json", "\0", "/", "", "\x1b[31m")),
        *((["--profile", "gh200", "--model", name], "model") for name in ("none.json", "\0", "/", "", "\x1b[31m")),
        *(
            (["--profile", "gh200", "--model", "13B", option, value], option.strip("-").replace("-", "."))
            for option in ("--micro-batch", "--sequence", "--gpu-memory-gb", "--world-size")
            for value in ("0", "-1", "x", "nan", "inf", "9" * 400, "", "\x1b[31m")
        ),
        (["--profile", "gh200", "--model", "13B", "--no-such-option"], "no.such.option"),
        (["--profile", "gh200"], "model"),
    ],
)
def test_a_malformed_argument_is_refused_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["plan", "--ranks-per-node", "4", *arguments])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    text = capsys.readouterr().err
    assert code == 2
    assert message.replace(".", "_") in text.replace("-", "_"), text
    assert text.replace("\n", "").isprintable()
    assert len(text) <= MAX_MESSAGE
