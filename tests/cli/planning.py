"""Run ``plan`` for a training run, and read its output."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from perf_model.__main__ import main

LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}

SWEEP = ["--profile", "gh200", "--model", "Llama-3-70B", "--ranks-per-node", "1", "--sequence", "4096"]

PLANNING_COMMANDS = ("plan", "sweep", "cluster")


def job(profile: str | Path = "h100-pcie5", model: str | Path = "13B", world_size: int = 4, **more: Any) -> list[str]:
    options = {"profile": profile, "model": model, "world_size": world_size, "ranks_per_node": 4, "micro_batch": 1}
    options |= {"sequence": 2048, **more}
    return [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]


@cache
def printed_plan(*arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as shown:
        assert main(["plan", *arguments, "--json"]) == 0
    return shown.getvalue()


def planned(arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed_plan(*arguments))
    return found


def words_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())
