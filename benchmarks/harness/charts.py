"""Draw rows: bars with their spread, stacked if several quantities add up, or lines over one entry of the setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from benchmarks.harness.rows import format_setting, machine_of

Rows = Sequence[Mapping[str, Any]]

BAR_INCHES, MARGIN_INCHES = 0.28, 0.9
MAX_SHOWN_KEYS = 2
"""If more entries of the setting vary, a label shows only those that differ from the first row's."""


class Chart(Protocol):
    """A selection of quantities and the way to draw them."""

    def draw(self, rows: Rows, figure: Any) -> None:
        """Draw ``rows``, which all have a number."""


class Bars:
    """One panel per entry of ``panels``, with a bar for each variant and setting.

    A panel is a quantity, or a tuple of patterns: the quantities that match are then stacked in one bar, and each
    setting has a panel of its own, so that no panel is dwarfed by another.
    """

    def __init__(self, *panels: str | tuple[str, ...]) -> None:
        self._panels = panels

    def draw(self, rows: Rows, figure: Any) -> None:
        """Draw the panels that have rows below each other."""
        panels = [panel for entry in self._panels for panel in _panels_of(rows, entry)]
        if not panels:
            return
        heights = [MARGIN_INCHES + BAR_INCHES * len(_bars(found)) for _, found in panels]
        figure.set_size_inches(10, sum(heights) + MARGIN_INCHES)
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (title, found) in zip(axes, panels, strict=True):
            _draw_bars(axis, found)
            axis.set_title(f"{title}, {found[0]['unit']}", fontsize=9, loc="left")


class Lines:
    """Lines of ``quantities`` over the entry ``x`` of the setting: one per quantity and variant.

    There is a panel for each value of the entry ``panel`` of the setting.
    """

    def __init__(self, *quantities: str, x: str, panel: str | None = None) -> None:
        self._quantities, self._x, self._panel = quantities, x, panel

    def draw(self, rows: Rows, figure: Any) -> None:
        """Draw the panels in rows of three."""
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
                points = lines.setdefault((row["variant"], row["quantity"]), [])
                points.append((row["setting"][self._x], row["median"]))
            for (variant, quantity), points in lines.items():
                line_label = f"{variant}: {quantity}" if len(self._quantities) > 1 else variant
                axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=line_label)
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


def draw(rows: Rows, folder: Path, chart: Chart) -> Path | None:
    """Draw the rows of one run into ``folder``, in a file named after the benchmark and the machine.

    Return its path, or None if all rows are waived.
    """
    name = chart_file_of(rows)
    if name is None:
        return None
    figure = Figure(layout="constrained")
    chart.draw([row for row in rows if "median" in row], figure)
    benchmark, machine = rows[0]["benchmark"], rows[0]["gpu"] or rows[0]["cpu"]
    figure.suptitle(f"{benchmark}: {machine}, {rows[0]['date'][:10]}, {rows[0]['commit']}", fontsize=10)
    path = folder / name
    figure.savefig(path, dpi=110)
    return path


def chart_file_of(rows: Rows) -> str | None:
    """Return the name of the chart's file, or None if there is no number to draw."""
    numbers = any("median" in row for row in rows)
    return f"{rows[0]['benchmark']}-{machine_of(rows[0])}.png" if numbers else None


def _panels_of(rows: Rows, panel: str | tuple[str, ...]) -> Iterator[tuple[str, Rows]]:
    """Yield the title and the rows of each panel."""
    if isinstance(panel, str):
        if found := [row for row in rows if row["quantity"] == panel]:
            yield panel, found
        return
    title = " + ".join(panel)
    found = [row for row in rows if any(fnmatch(row["quantity"], pattern) for pattern in panel)]
    by_setting: dict[str, list[Mapping[str, Any]]] = {}
    for row in found:
        by_setting.setdefault(_setting_label(row, found), []).append(row)
    for setting, rows_of_setting in by_setting.items():
        yield f"{setting}: {title}" if setting else title, rows_of_setting


def _bars(found: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of each bar by its label."""
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
        segments = {name: row for name, rows in bars.items() for row in rows if row["quantity"] == quantity}
        axis.barh(
            [positions[name] for name in segments],
            [row["median"] for row in segments.values()],
            left=[ends[name] for name in segments],
            xerr=spread_of(segments.values()) if len(quantities) == 1 else None,
            ecolor="#333333",
            capsize=2,
            label=quantity,
        )
        for name, row in segments.items():
            ends[name] += row["median"]
    axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axis.invert_yaxis()
    if len(quantities) > 1:
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def spread_of(found: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """Return how far the 20th and the 80th percentile of each row are from its median."""
    ends = [(row["median"] - row["p20"], row["p80"] - row["median"]) for row in found]
    return [[below for below, _ in ends], [above for _, above in ends]]


def label(row: Mapping[str, Any], among: Rows) -> str:
    """Return the variant, and the entries of its setting that vary ``among`` the rows."""
    setting = _setting_label(row, among)
    return f"{row['variant']} ({setting})" if setting else row["variant"]


def _setting_label(row: Mapping[str, Any], among: Rows) -> str:
    """Return the entries of the setting that vary ``among`` the rows; if many vary, only those unlike the first row."""
    keys = varying([other["setting"] for other in among])
    if len(keys) > MAX_SHOWN_KEYS:
        keys = [key for key in keys if row["setting"].get(key) != among[0]["setting"].get(key)]
    return ", ".join(format_setting(key, row["setting"][key]) for key in keys if key in row["setting"])


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all settings."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]
