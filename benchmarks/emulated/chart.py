"""Draw predicted bars beside measured bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.charts import BAR_INCHES, MARGIN_INCHES, Rows, spread_of
from benchmarks.harness.rows import format_setting


class PredictedAndMeasured:
    """Two bars per variant, in a row of panels for each setting: one panel per pair of quantities.

    ``pairs`` has the names of the predicted and of the measured quantity. ``titles`` are the entries of the setting in
    which the rows of the panels differ.
    """

    def __init__(self, *pairs: tuple[str, str], titles: Sequence[str]) -> None:
        self._pairs = pairs
        self._titles = titles

    def draw(self, rows: Rows, figure: Any) -> None:
        """Draw the panels."""
        by_setting: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if any(row["quantity"] in pair for pair in self._pairs):
                title = ", ".join(format_setting(key, row["setting"][key]) for key in self._titles)
                by_setting.setdefault(title, []).append(row)
        if not by_setting:
            return
        heights = [MARGIN_INCHES + BAR_INCHES * len({row["variant"] for row in found}) for found in by_setting.values()]
        figure.set_size_inches(6.5 * len(self._pairs), sum(heights))
        axes = figure.subplots(len(by_setting), len(self._pairs), squeeze=False, height_ratios=heights)
        for line, (setting, found) in zip(axes, by_setting.items(), strict=True):
            for axis, pair in zip(line, self._pairs, strict=True):
                _draw_pair(axis, pair, found)
                axis.set_title(f"{setting}\n{pair[1]}, s", fontsize=8, loc="left")
        axes[0][0].legend(fontsize=7, loc="lower right")


def _draw_pair(axis: Any, pair: Sequence[str], found: Rows) -> None:
    variants = list(dict.fromkeys(row["variant"] for row in found))
    for number, quantity in enumerate(pair):
        bars = {row["variant"]: row for row in found if row["quantity"] == quantity}
        axis.barh(
            [variants.index(variant) + 0.38 * (number - 0.5) for variant in bars],
            [row["median"] for row in bars.values()],
            height=0.38,
            xerr=spread_of(bars.values()),
            ecolor="#333333",
            capsize=2,
            label=quantity,
        )
    axis.set_yticks(range(len(variants)), variants, fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.invert_yaxis()
