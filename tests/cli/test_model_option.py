"""Test the values of ``--model`` and ``--params``, and the progress that is shown while a command runs."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

from perf_model.cli.model_option import read_model
from perf_model.cli.planning_commands import _parameters
from perf_model.cli.screen import progress
from perf_model.training_run.model import ModelError

SMALL = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


def options(model: str | Path) -> argparse.Namespace:
    names = ("params", "layers", "hidden", "every", "share_layers")
    return argparse.Namespace(model=str(model), **dict.fromkeys(names))


def test_a_folder_and_a_name_in_the_cache_are_read_as_their_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SMALL))
    from_folder = read_model(options(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    by_hub = read_model(options("org/tiny"))
    assert (by_hub.name, by_hub.tensors) == ("tiny", from_folder.tensors)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert read_model(options("org/tiny")) == by_hub


def test_an_unknown_name_gets_near_presets_and_the_place_of_a_config() -> None:
    with pytest.raises(ModelError) as caught:
        read_model(options("meta-llama/Llama-3.1-8B"))
    _, remedy = str(caught.value).splitlines()
    assert remedy.startswith("Presets: Llama-3-8B, ")
    assert "https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json" in remedy


@pytest.mark.parametrize(
    ("text", "numel"),
    [("7B", 7 * 10**9), ("8.03B", 8_030_000_000), ("500M", 5 * 10**8), ("1T", 10**12), ("32e9", 32 * 10**9)],
)
def test_parameters_may_have_a_unit(text: str, numel: int) -> None:
    assert _parameters(text) == numel


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_on_a_terminal_after_a_second(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("Working"):
        pass
    assert capsys.readouterr().err == ""
    with progress("Working"):
        time.sleep(1.3)
    output = capsys.readouterr()
    assert ("Working" in output.err) is is_terminal
    assert output.out == ""
