"""Pictures of rows: bars with their spread, stacked where several quantities make up one; or lines over a setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from benchmarks.harness.rows import machine_of, said

Rows = Sequence[Mapping[str, Any]]

BAR_INCHES, MARGIN_INCHES = 0.28, 0.9
FEW = 2
"""Parts of a setting."""


class Picture(Protocol):
    def draw(self, rows: Rows, figure: Any) -> None:
        """``rows`` are those with a number."""


class Bars:
    """Of each quantity in ``panels`` a bar for each arm and setting. Quantities that match one of several patterns are
    parts of a bar, and each setting has a panel of its own then: none is dwarfed by another."""

    def __init__(self, *panels: str | tuple[str, ...]) -> None:
        self._panels = panels

    def draw(self, rows: Rows, figure: Any) -> None:
        panels = [panel for its in self._panels for panel in _panels_of(rows, its)]
        if not panels:
            return
        heights = [MARGIN_INCHES + BAR_INCHES * len(_bars(found)) for _, found in panels]
        figure.set_size_inches(10, sum(heights) + MARGIN_INCHES)
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (title, found) in zip(axes, panels, strict=True):
            _draw_bars(axis, found)
            axis.set_title(f"{title}, {found[0]['unit']}", fontsize=9, loc="left")


class Lines:
    """Of ``quantities`` over setting ``x``, a line for each and each arm; a panel for each value of ``panel``."""

    def __init__(self, *quantities: str, x: str, panel: str | None = None) -> None:
        self._quantities, self._x, self._panel = quantities, x, panel

    def draw(self, rows: Rows, figure: Any) -> None:
        rows = [row for row in rows if row["quantity"] in self._quantities and self._x in row["setting"]]
        panels: dict[object, list[Mapping[str, Any]]] = {}
        for row in rows:
            panels.setdefault(row["setting"].get(self._panel), []).append(row)
        if not panels:
            return
        columns = min(3, len(panels))
        levels = -(-len(panels) // columns)
        figure.set_size_inches(4.2 * columns + 1, 3.4 * levels + MARGIN_INCHES)
        axes = list(figure.subplots(levels, columns, squeeze=False).flat)
        for axis, (name, found) in zip(axes, panels.items(), strict=False):
            lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for row in found:
                lines.setdefault((row["arm"], row["quantity"]), []).append((row["setting"][self._x], row["median"]))
            for (arm, quantity), points in lines.items():
                told = f"{arm}: {quantity}" if len(self._quantities) > 1 else arm
                axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=told)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            title = str(name) if name is not None else self._quantities[0]
            axis.set_title(f"{title}, {found[0]['unit']}", fontsize=9, loc="left")
            axis.set_xlabel(self._x, fontsize=8)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.3)
        for axis in axes[len(panels) :]:
            axis.remove()
        axes[0].legend(fontsize=7)


def draw(rows: Rows, folder: Path, picture: Picture) -> Path | None:
    """Of one run; into ``folder``, under the names of the benchmark and the machine. None where all was waived."""
    name = picture_of(rows)
    if name is None:
        return None
    figure = Figure(layout="constrained")
    picture.draw([row for row in rows if "median" in row], figure)
    benchmark, machine = rows[0]["benchmark"], rows[0]["gpu"] or rows[0]["cpu"]
    figure.suptitle(f"{benchmark}: {machine}, {rows[0]['date'][:10]}, {rows[0]['commit']}", fontsize=10)
    path = folder / name
    figure.savefig(path, dpi=110)
    return path


def picture_of(rows: Rows) -> str | None:
    """The name of its file, if there is a number to draw."""
    numbers = any("median" in row for row in rows)
    return f"{rows[0]['benchmark']}-{machine_of(rows[0])}.png" if numbers else None


def _panels_of(rows: Rows, panel: str | tuple[str, ...]) -> Iterator[tuple[str, Rows]]:
    """With their titles."""
    if isinstance(panel, str):
        if found := [row for row in rows if row["quantity"] == panel]:
            yield panel, found
        return
    title = " + ".join(panel)
    found = [row for row in rows if any(fnmatch(row["quantity"], pattern) for pattern in panel)]
    apart: dict[str, list[Mapping[str, Any]]] = {}
    for row in found:
        apart.setdefault(_setting(row, found), []).append(row)
    for setting, its in apart.items():
        yield f"{setting}: {title}" if setting else title, its


def _bars(found: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """By label."""
    bars: dict[str, list[Mapping[str, Any]]] = {}
    for row in found:
        bars.setdefault(label(row, found), []).append(row)
    return bars


def _draw_bars(axis: Any, found: Rows) -> None:
    bars = _bars(found)
    positions = {name: position for position, name in enumerate(bars)}
    quantities = list(dict.fromkeys(row["quantity"] for row in found))
    ends = dict.fromkeys(bars, 0.0)
    for quantity in quantities:
        of = {name: row for name, rows in bars.items() for row in rows if row["quantity"] == quantity}
        axis.barh(
            [positions[name] for name in of],
            [row["median"] for row in of.values()],
            left=[ends[name] for name in of],
            xerr=_spread(of.values()) if len(quantities) == 1 else None,
            ecolor="#333333",
            capsize=2,
            label=quantity,
        )
        for name, row in of.items():
            ends[name] += row["median"]
    axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axis.invert_yaxis()
    if len(quantities) > 1:
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _spread(found: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    ends = [(row["median"] - row["p20"], row["p80"] - row["median"]) for row in found]
    return [[below for below, _ in ends], [above for _, above in ends]]


def label(row: Mapping[str, Any], among: Rows) -> str:
    """The arm, and what of its setting is not the same for all of them."""
    told = _setting(row, among)
    return f"{row['arm']} ({told})" if told else row["arm"]


def _setting(row: Mapping[str, Any], among: Rows) -> str:
    """What is not the same for all of them; where that is much, only what is other than with the first."""
    keys = varying([other["setting"] for other in among])
    if len(keys) > FEW:
        keys = [key for key in keys if row["setting"].get(key) != among[0]["setting"].get(key)]
    return ", ".join(said(key, row["setting"][key]) for key in keys if key in row["setting"])


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all of them."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]
