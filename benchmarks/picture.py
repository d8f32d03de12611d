"""A picture of a benchmark's rows: for each quantity a panel, for each arm a bar, with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import said

MOST_BARS = 24


def draw(benchmark: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """``<benchmark>.png`` in ``folder``; of what has a number, in the order of the rows."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "median" in row:
            panels.setdefault((row["quantity"], row["unit"]), []).append(row)
    shown = {key: found[:MOST_BARS] for key, found in panels.items() if len(found) > 1} or panels
    heights = [1 + 0.3 * len(found) for found in shown.values()]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, ((quantity, unit), found) in zip(axes, shown.items(), strict=True):
        medians = [row["median"] for row in found]
        spread = [[row["median"] - row["p20"] for row in found], [row["p80"] - row["median"] for row in found]]
        positions = range(len(found))
        axis.barh(positions, medians, xerr=spread, color="#4c72b0", ecolor="#333333", capsize=2)
        axis.set_yticks(positions, [label(row, found) for row in found], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f"{quantity}, {unit}" if unit else quantity, fontsize=9, loc="left")
    machine = rows[0]["gpu"] or rows[0]["cpu"]
    figure.suptitle(f"{benchmark}: {machine}, {rows[0]['date'][:10]}, {rows[0]['commit']}", fontsize=10)
    path = folder / f"{benchmark}.png"
    figure.savefig(path, dpi=110)
    return path


def label(row: dict[str, Any], among: Sequence[dict[str, Any]]) -> str:
    """The arm, and what of its setting is not the same for all of them."""
    differ = {
        key: value
        for key, value in row["setting"].items()
        if any(other["setting"].get(key) != value for other in among) and key not in ("simulated", "model", "ranks")
    }
    told = ", ".join(said(key, value) for key, value in differ.items())
    return f"{row['arm']} ({told})" if told else row["arm"]
