"""Test that the scripts of ``docs/upstream`` still have the output that ``docs/upstream.md`` states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, free_port, remove_shared_memory, run_ranks

FOLDER = REPOSITORY / "docs" / "upstream"

TWO_RANKS = ("latest_too_early.py", "gather_stream.py", "lost_rank.py")


def documented_output() -> dict[str, list[str]]:
    """Return the quotations in the document's column "Printed", in order, by the name of the script.

    A quotation leaves out the parts that differ between runs.
    """
    document = (REPOSITORY / "docs" / "upstream.md").read_text()
    heading, _, *rows = (line.strip("| ").split(" | ") for line in document.splitlines() if line.startswith("|"))
    script, printed = heading.index("Script"), heading.index("Printed")
    return {row[script].strip("`"): re.findall("`(.+?)`", row[printed]) for row in rows}


PRINTED = documented_output()


def test_every_script_is_in_the_document_with_its_output_and_has_at_most_40_lines() -> None:
    scripts = sorted(path.name for path in FOLDER.iterdir() if path.suffix == ".py")
    assert scripts == sorted(PRINTED)
    assert all(PRINTED.values()), PRINTED
    for name in scripts:
        assert len((FOLDER / name).read_text().splitlines()) <= 40, name


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_the_script_prints_what_the_document_states_without_the_plugin(name: str, tmp_path: Path) -> None:
    stated = re.compile(".*".join(map(re.escape, PRINTED[name])), re.DOTALL)
    ranks = 2 if name in TWO_RANKS else 1
    # The launcher of DeepSpeed also sets the number of nodes, and the same port in every run.
    port = free_port()
    variables = {"CROSS_RANK": "0", "CROSS_SIZE": "1", "TMPDIR": str(tmp_path), "MASTER_PORT": str(port)}
    # Both ranks of this script know its folder. A second run must not read what the first one has left.
    for _ in range(2 if name == "latest_too_early.py" else 1):
        launched = run_ranks(ranks, [str(FOLDER / name)], timeout_s=300, **variables)
        remove_shared_memory(port)
        outputs = [finished.output for finished in launched]
        assert any(stated.search(output) for output in outputs), outputs
        assert not any("[deep_opt_states]" in output for output in outputs)
