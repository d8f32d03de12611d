"""Test that the scripts of ``docs/upstream`` still show the problems of DeepSpeed that ``docs/upstream.md`` lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import REPOSITORY, free_port, remove_shared_memory, run_ranks

FOLDER = REPOSITORY / "docs" / "upstream"

PRINTED = {
    "shared_layer.py": "relative error of the gradient: 0.80",
    "missing_gradient.py": "second layer used: False; its weights moved by 1.00",
    "partial_accumulation.py": "1 of 2 micro-batches reach the layer: gradient 1.5, expected 0.5",
    "failed_backward.py": "RuntimeError: out of memory\nAssertionError",
    "latest_too_early.py": "latest names step2, whose files are: ['zero_pp_rank_0_mp_rank_00_optim_states.pt']",
    "gather_stream.py": "every output is 8.0; the largest is 0.0",
    "decoupled_load.py": "UnpicklingError: Weights only load failed",
    "lost_rank.py": "Timeout (0:00:30)!",
}

TWO_RANKS = ("latest_too_early.py", "gather_stream.py", "lost_rank.py")


def test_every_script_is_in_the_document_and_has_at_most_40_lines() -> None:
    scripts = sorted(path.name for path in FOLDER.iterdir() if path.suffix == ".py")
    assert scripts == sorted(PRINTED)
    document = (REPOSITORY / "docs" / "upstream.md").read_text()
    for name in scripts:
        assert f"`{name}`" in document
        assert len((FOLDER / name).read_text().splitlines()) <= 40, name


@pytest.mark.thorough
@pytest.mark.parametrize("name", PRINTED)
def test_the_script_shows_the_problem_without_the_plugin(name: str, tmp_path: Path) -> None:
    ranks = 2 if name in TWO_RANKS else 1
    # The launcher of DeepSpeed also sets the number of nodes, and the same port in every run.
    port = free_port()
    variables = {"CROSS_RANK": "0", "CROSS_SIZE": "1", "TMPDIR": str(tmp_path), "MASTER_PORT": str(port)}
    # Both ranks of this script know its folder. A second run must not read what the first one has left.
    for _ in range(2 if name == "latest_too_early.py" else 1):
        launched = run_ranks(ranks, [str(FOLDER / name)], timeout_s=300, **variables)
        remove_shared_memory(port)
        outputs = [finished.output for finished in launched]
        assert any(PRINTED[name] in output for output in outputs), outputs
        assert not any("[deep_opt_states]" in output for output in outputs)
