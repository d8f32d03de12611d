"""Hold the lines of the product to the table in docs/dev/design.md, and the files to read first to their limit."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
DESIGN = (REPOSITORY / "docs/dev/design.md").read_text()


def section(title: str) -> str:
    return DESIGN.partition(f"## {title}\n")[2].partition("\n## ")[0]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_folder_has_more_lines_than_the_table_in_the_documentation_allows() -> None:
    rows = re.findall(r"^\| `?([^|`]+)`? \| ([\d,]+) \|$", section("Lines"), re.MULTILINE)
    allowed = {folder: int(lines.replace(",", "")) for folder, lines in rows}
    in_all = allowed.pop("in all")
    counted = dict.fromkeys(allowed, 0)
    for package in ("deep_opt_states", "perf_model"):
        for path in (REPOSITORY / package).rglob("*.py"):
            parents = map(str, path.relative_to(REPOSITORY).parents)
            counted[next(folder for folder in parents if folder in allowed)] += lines_of(path)
    assert min(counted.values()) > 0, "each folder of the table exists"
    assert {folder: lines for folder, lines in counted.items() if lines > allowed[folder]} == {}
    assert sum(allowed.values()) == in_all


def test_the_eight_files_to_read_first_are_short() -> None:
    paths = re.findall(r"`([a-z_0-9/]+\.py)`", section("Where to start"))
    assert len(paths) == 8
    assert sum(lines_of(REPOSITORY / path) for path in paths) <= 2_000
