"""Test ``sweep``: its table, its file and the pairs that it refuses."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from perf_model.__main__ import main
from perf_model.cli import inputs, model_option, sweep_command
from perf_model.training_run.hf_config import read_hf_config
from tests.cli.planning import LLAMA, SWEEP


def test_sweep_prints_a_table_and_writes_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.csv"
    sizes = ["--world-sizes", "1,8,16", "--micro-batches", "1,2", "--unit-size", "500000000", "--csv", str(path)]
    assert main(["sweep", *SWEEP, *sizes]) == 0
    shown = capsys.readouterr().out
    rows = list(csv.DictReader(path.open()))
    assert [(row["world_size"], row["micro_batch"]) for row in rows] == [
        (world, batch) for world in ("1", "8", "16") for batch in ("1", "2")
    ]
    for row in rows:
        assert (row["iteration_s"] == "") == (row["why"] != "") == (row["world_size"] == "1")
    assert float(rows[2]["tokens_per_s"]) == pytest.approx(8 * 4096 / float(rows[2]["iteration_s"]))
    assert "1 GPUs, micro-batch 2: Nothing fits" in shown
    assert main(["sweep", *SWEEP, "--world-sizes", "1", "--micro-batches", "1", *sizes[4:6]]) == 1
    capsys.readouterr()
    assert main(["sweep", *SWEEP, *sizes[:-2], "--csv", str(tmp_path / "none" / "sweep.csv")]) == 2
    output = capsys.readouterr()
    assert output.out == shown, "the table is printed although the file cannot be written"
    assert output.err.startswith("--csv: must be a file that can be written")


def test_sweep_marks_the_best_row_and_shows_mfu_in_per_cent(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world-sizes", "8", "--micro-batches", "2,1,4", "--unit-size", "1000000000"]
    assert main(["sweep", *SWEEP, *sizes]) == 0
    header, *rows = capsys.readouterr().out.splitlines()[:4]
    tokens = [float(row.split()[header.split().index("tokens/s") + 2].replace(",", "")) for row in rows]
    assert rows[tokens.index(max(tokens))].endswith("*")
    assert not rows[1].endswith("*"), "with fewer tokens/s than the row above"
    assert all(re.search(r" \d+% ", row) for row in rows)
    assert max(map(len, (header, *rows))) <= 60


def test_sweep_has_a_limit_of_points(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep_command, "read_inputs", lambda *_: pytest.fail("read"))
    many = ",".join(map(str, range(1, 101)))
    assert main(["sweep", *SWEEP, "--world-sizes", many, "--micro-batches", many]) == 2
    assert "must make at most 500 pairs, found 10,000" in capsys.readouterr().err


def test_sweep_refuses_an_impossible_pair_before_it_plans_and_reads_the_model_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = []
    monkeypatch.setattr(model_option, "read_hf_config", lambda path: read.append(path) or read_hf_config(path))
    monkeypatch.setattr(inputs.Inputs, "forecast", lambda _: pytest.fail("planned"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    model = ["--profile", "h100", "--model", str(path), "--ranks-per-node", "4", "--sequence", "2048"]
    assert main(["sweep", *model, "--world-sizes", "4,8,6", "--micro-batches", "1,2"]) == 2
    assert capsys.readouterr().err.startswith("ranks_per_node: must divide the world size, 6, found 4")
    assert read == [path]
