"""Write RESULTS.md from the rows: three tables and a chart, so that no result on the page is typed by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness.rows import (
    BF16_SPEEDUP,
    BIT_IDENTICAL,
    COST_SHARE,
    EMULATED,
    ERROR,
    ITERATION_SPEEDUP,
    MEMORY_SHARE,
    RETAINED,
    UPDATE_SPEEDUP,
    format_row,
    last_rows,
)

Rows = Sequence[Mapping[str, Any]]

CHART = "speedup.png"
GPU_MEMORY, HOST_MEMORY = "peak GPU memory", "host memory of the process"


@dataclass(frozen=True)
class Aim:
    """Bounds for the median of ``quantity``; an answer counts as 1 if it is yes and as 0 if it is no.

    It concerns all rows whose benchmark and variant match the patterns and whose setting has the values of ``where``,
    either of machines with a GPU, or of machines with 2 cores and no GPU. The worst row counts.
    """

    text: str
    benchmark: str
    variant: str
    quantity: str
    at_least: float = float("-inf")
    at_most: float = float("inf")
    where: Mapping[str, object] = field(default_factory=dict)
    on_gpu: bool = False

    def worst(self, rows: Rows) -> Mapping[str, Any] | None:
        """Return the row with the smallest margin, or None if nothing was measured."""
        found = [row for row in rows if self._concerns(row)]
        return min(found, key=self.margin) if found else None

    def margin(self, row: Mapping[str, Any]) -> float:
        """Return how far a row is within the bounds, or a negative number if it is out of bounds."""
        measured = float(row.get("median", row.get("value", 0.0)))
        return min(measured - self.at_least, self.at_most - measured)

    def _concerns(self, row: Mapping[str, Any]) -> bool:
        return (
            row["quantity"] == self.quantity
            and fnmatch(row["benchmark"], self.benchmark)
            and fnmatch(row["variant"], self.variant)
            and not isinstance(row.get("value", row.get("waived")), str)
            and (row["gpu"] is not None if self.on_gpu else (row["gpu"], row["cores"]) == (None, 2))
            and all(row["setting"].get(key) == value for key, value in self.where.items())
        )


H100 = {"machine": f"{EMULATED} h100-pcie5, 4 GPUs", "states": None}
STEP_ON_CPU, PLANNED = ("update_phase", "ours, all on the CPU"), ("emulated", "planned, overlap")
OURS, ON_DISK = ("training_step", "ours"), ("emulated", "plugin, states on disk")
BF16, UNCLIPPED = ("adam", "CPU, ours, states bf16"), {"gradients": "no clipping"}
EMULATED_BITS, EMULATED_COST_SHARE = f"{BIT_IDENTICAL} ({EMULATED})", f"{EMULATED} {COST_SHARE}"
EMULATED_SPEEDUP = f"{EMULATED} {ITERATION_SPEEDUP}"
ONE = {"micro_batch": 1}
COST_TEXT = "cost at most 10 %"

AIMS = (
    Aim("GPU: same bits", "*", "ours*", BIT_IDENTICAL, at_least=1, on_gpu=True),
    Aim("2 cores: same bits", "*", "*ours*", BIT_IDENTICAL, at_least=1),
    Aim("EMULATED: same bits", "emulated", "*", EMULATED_BITS, at_least=1),
    Aim(
        "GPU: iteration 2x as fast", *OURS, ITERATION_SPEEDUP, at_least=2, where=ONE | {"accumulation": 1}, on_gpu=True
    ),
    Aim(f"GPU, batch 8: {COST_TEXT}", *OURS, COST_SHARE, at_most=0.1, where={"micro_batch": 8}, on_gpu=True),
    Aim("2 cores: iteration never slower", *OURS, ITERATION_SPEEDUP, at_least=1),
    Aim("2 cores: `step()` on the CPU 1.55x as fast", *STEP_ON_CPU, UPDATE_SPEEDUP, at_least=1.55),
    # On the software GPU, kernels run on the host's cores, so the clock would count them.
    Aim(
        "2 cores: hooks cost at most 3 % of host time",
        "hooks",
        "ours*",
        "forward + backward / stock's, CPU time",
        at_most=1.03,
    ),
    Aim("2 cores: Adam with bf16 states 1.8x as fast", *BF16, BF16_SPEEDUP, at_least=1.8, where=UNCLIPPED),
    Aim("2 cores: the same at 95 % of memory bandwidth", *BF16, MEMORY_SHARE, at_least=0.95, where=UNCLIPPED),
    Aim(
        "EMULATED H100: iteration 2x as fast", *PLANNED, EMULATED_SPEEDUP, at_least=2, where={**H100, "micro_batch": 1}
    ),
    *(
        Aim(f"EMULATED H100, batch {size}: {COST_TEXT}", *PLANNED, EMULATED_COST_SHARE, at_most=0.1, where=where)
        for size, where in ((size, H100 | {"micro_batch": size}) for size in (1, 8))
    ),
    *(
        Aim(f"EMULATED: {name} predicted within 5 %", "emulated", "*", quantity, at_least=-0.05, at_most=0.05)
        for name, quantity in ((name, f"{EMULATED} {name}, {ERROR}") for name in ("iteration", "update"))
    ),
    Aim("EMULATED SSD: update half as long", *ON_DISK, f"{EMULATED} update / stock's", at_most=0.5),
    Aim("EMULATED SSD: 1.2x its bytes", *ON_DISK, f"{EMULATED} update / seconds of its bytes", at_most=1.2),
)


@dataclass(frozen=True, kw_only=True)
class StockComparison:
    """The rows by quantity of stock and of the plugin in one setting of one run; ``name`` is the plugin's variant."""

    setting: Mapping[str, Any]
    name: str
    stock: Mapping[str, Mapping[str, Any]]
    plugin: Mapping[str, Mapping[str, Any]]

    @property
    def iterations(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the rows of the iterations of both."""
        names = ("iteration", f"{EMULATED} iteration", "mean of all iterations")
        (name,) = (name for name in names if name in self.stock and name in self.plugin)
        return self.stock[name], self.plugin[name]

    @property
    def source(self) -> str:
        """Return where the seconds come from: a GPU, a CPU, or an EMULATED machine."""
        if EMULATED in self.iterations[0]["quantity"]:
            return EMULATED
        return "GPU" if self.iterations[0]["gpu"] else "CPU"

    @property
    def speedup(self) -> Mapping[str, Any]:
        """Return the row of the speed-up. Without one, it is the ratio of the medians, which has no spread."""
        stock, plugin = self.iterations
        quantity = EMULATED_SPEEDUP if self.source == EMULATED else ITERATION_SPEEDUP
        return self.plugin.get(quantity, {"unit": "times", "median": stock["median"] / plugin["median"]})

    @property
    def machine(self) -> str:
        """Return the machine, real or emulated, without words that all machines of its kind have."""
        row = self.iterations[0]
        name = str(self.setting.get("machine", row["gpu"] or f"{row['cpu']}, {row['cores']} cores"))
        return re.sub(r"EMULATED |NVIDIA | 80GB.*", "", name).replace(", 1 GPU", "").replace(", 4 GPUs", " x4")

    @property
    def model(self) -> str:
        """Return the model, its batches, and other parts of the setting and of the variant's name."""
        name = self.setting.get("model") or f"{self.setting['parameters'] / 1e6:,.0f}M"
        batch = f"{self.setting['tokens']:,} tokens" if "tokens" in self.setting else f"{self.setting['micro_batch']}"
        if (accumulation := self.setting.get("accumulation", 1)) > 1:
            batch += f"x{accumulation}"
        more = [f"{self.setting['states']} states"] if "states" in self.setting else []
        more += ["SSD " + self.setting["disk"].partition(", ")[2]] if "disk" in self.setting else []
        more += [self.name.partition(", ")[2]] if self.name.startswith("ours, ") else []
        return ", ".join([f"{name}/{batch}", *more])

    @property
    def cells(self) -> list[str]:
        """Return the cells of the comparison's line."""
        emulated = self.source == EMULATED
        bits = [row["value"] for quantity, row in self.plugin.items() if quantity.startswith(BIT_IDENTICAL)]
        memory = GPU_MEMORY if self.source == "GPU" else HOST_MEMORY
        share = f"{self.setting['gpu_memory_share']:.0%}" if emulated and "disk" not in self.setting else "-"
        return [
            self.machine,
            self.model,
            *(f"{row['median']:.3g}" for row in self.iterations),
            _with_spread(self.speedup),
            _cost(self.plugin.get(EMULATED_COST_SHARE if emulated else COST_SHARE, {})),
            "-" if not bits else {True: "yes", False: "no"}.get(bits[0], bits[0]),
            *([share] if emulated else [self._both(RETAINED, 100), self._both(memory, 1e-9)]),
        ]

    def _both(self, quantity: str, factor: float) -> str:
        """Return the medians of stock and of the plugin times ``factor``, or a dash if one was not measured."""
        both = [rows[quantity] for rows in (self.stock, self.plugin) if "median" in rows.get(quantity, {})]
        return "/".join(f"{factor * row['median']:.3g}" for row in both) if len(both) == 2 else "-"


def _with_spread(row: Mapping[str, Any], factor: float = 1) -> str:
    """Return the median times ``factor``, with the spread in parentheses if there is one."""
    if not row:
        return "-"
    median, *ends = (f"{factor * row[name]:.3g}" for name in ("median", "p20", "p80") if name in row)
    return f"{median} ({' to '.join(ends)})" if ends else median


COMPARED = {
    "training_step": {"ours": "stock"},
    "gpu": {"ours, empty block": "stock", "ours, 8 GB": "stock"},
    "emulated": {"planned, overlap": "stock", ON_DISK[1]: "stock, states on disk"},
}
"""The variants of the plugin that the page shows, with the variant that each is compared with."""


def comparisons(rows: Rows) -> list[StockComparison]:
    """Return the last comparison of each machine, model and batch, in the order of the rows.

    Settings that differ only in DeepSpeed's sub-groups are one line, since the planner cuts units of its own.
    """
    by_run: dict[tuple[str, ...], dict[str, dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        if row["benchmark"] in COMPARED and "waived" not in row:
            run = row["date"], row["benchmark"], str(row["gpu"]), str(row["setting"])
            by_run.setdefault(run, {}).setdefault(row["variant"], {})[row["quantity"]] = row
    found: dict[tuple[str, ...], StockComparison] = {}
    for (_, benchmark, *_), variants in sorted(by_run.items(), key=lambda item: item[0][0]):
        for name, stock in COMPARED[benchmark].items():
            if name in variants and stock in variants:
                setting = next(iter(variants[name].values()))["setting"]
                one = StockComparison(setting=setting, name=name, stock=variants[stock], plugin=variants[name])
                found[one.source, one.machine, one.model] = one
    return list(found.values())


def report(folder: Path) -> str:
    """Return the page in Markdown, and draw its chart into ``folder``."""
    rows = last_rows(folder)
    by_source: dict[str, list[StockComparison]] = {"GPU": [], "CPU": [], EMULATED: []}
    for one in comparisons(rows):
        by_source[one.source].append(one)
    draw(by_source, folder / CHART)
    head = ["machine", "model/batch", "stock, s", "plugin, s", "speed-up", "cost, %", "same bits"]
    measured = [*head, "retained, %", "memory, GB"]
    tables = {source: _table(measured, (one.cells for one in found)) for source, found in by_source.items()}
    tables[EMULATED] = _table(["source", *head, "memory"], ([EMULATED, *one.cells] for one in by_source[EMULATED]))
    return PAGE_TEXT.format(
        **tables,
        **{f"{source.lower()}_range": _range(found) for source, found in by_source.items()},
        pipelined=_pipelined(rows),
        aims="\n".join(aim_lines(rows)),
        runs="\n".join(_runs([one for found in by_source.values() for one in found])),
    )


def _cost(row: Mapping[str, Any]) -> str:
    return "noise" if row.get("p20", 0.0) < 0 else _with_spread(row, 100)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"|{'|'.join(cells)}|" for cells in (head, ["---"] * len(head), *lines))


def _range(found: Sequence[StockComparison]) -> str:
    ratios = sorted(one.speedup["median"] for one in found)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "(not measured)"


def _pipelined(rows: Rows) -> str:
    """Return the seconds of an iteration of stock with its pipelined swapper, which is off by default."""
    wanted = "stock, pipelined", f"{EMULATED} iteration"
    return " and ".join(f"{row['median']:.3g} s" for row in rows if (row["variant"], row["quantity"]) == wanted)


def _runs(found: Sequence[StockComparison]) -> Iterator[str]:
    """Yield a line for each run whose rows the tables show."""
    for one in {one.iterations[0]["date"]: one for one in found}.values():
        row = one.iterations[0]
        where = row["gpu"] or f"{row['cpu']}{f', {EMULATED}' if one.source == EMULATED else ''}"
        versions = ", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "deepspeed"))
        yield f"- {where}, {row['cores']} cores: {row['date'][:10]}, {row['commit']}, {versions}"


def aim_lines(rows: Rows) -> Iterator[str]:
    """Yield a line for each aim that is missed or was not measured, and one with all others."""
    met = []
    for aim in AIMS:
        worst = aim.worst(rows)
        if worst is None:
            yield f"- {aim.text}: not measured"
        elif aim.margin(worst) < 0:
            yield f"- {aim.text}: **missed**, {format_row(worst)[0]}"
        else:
            met.append(aim.text)
    yield f"- met: {'; '.join(met)}"


def draw(by_source: Mapping[str, Sequence[StockComparison]], path: Path) -> None:
    """Draw a bar of the speed-up for each comparison, with its spread. EMULATED bars are hatched."""
    figure = Figure(figsize=(9, 0.25 * sum(map(len, by_source.values())) + 1), layout="constrained")
    axis = figure.subplots()
    names: list[str] = []
    for color, (source, found) in zip(("#2a6f97", "#8a8a8a", "#d9a441"), by_source.items(), strict=True):
        for one in found:
            median = one.speedup["median"]
            ends = [[median - one.speedup.get("p20", median)], [one.speedup.get("p80", median) - median]]
            hatch = "///" if source == EMULATED else None
            axis.barh([len(names)], [median], xerr=ends, color=color, hatch=hatch, capsize=2)
            names.append(f"{source if source == EMULATED else 'measured'}, {one.machine}: {one.model}")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("speed-up of an iteration over stock DeepSpeed (hatched: EMULATED)", fontsize=8)
    figure.savefig(path, dpi=110)


PAGE_TEXT = """\
# Results

An iteration is {gpu_range} times as fast as with stock DeepSpeed on one GPU, {cpu_range} times without a GPU, and
{emulated_range} times on EMULATED machines.

![Speed-ups](results/speedup.png)

*Stock* is DeepSpeed's ZeRO-3 with optimizer offloading and its defaults; the plugin trains the same model on the same
data. A speed-up is the median of interleaved runs with its 20th to 80th percentile; without these, it divides two
medians. The *cost* is an iteration less one of the same engine without an update, in % of stock's, or *noise* if its
spread includes 0. *Retained*: tokens
per second, of those without offload. A pair is stock's and the plugin's. *Same bits*: losses and weights equal stock's.
`-`: not measured.

## Measured on GPUs

Random models: 1,012M parameters, sequences of 2,048 bytes, and 4.4 GB of GPU memory for the plugin; Qwen3-4B with
recomputation, and 8 GB or, with the empty block, all that is free. The memory is the GPU's.

{GPU}

## Measured without a GPU

Sequences of 64 bytes; `1x4` accumulates 4 micro-batches of 1. The memory is the host's.

{CPU}

## EMULATED

Nothing here was measured on a GPU or a disk. A small model trains for real; copies, kernels and updates take as long as
on the machine, by the rates of a preset. The memory is the share of the GPU's that the plugin may use. On the SSD,
stock's pipelined swapper, which is off by default and not in the table, takes {pipelined}.

{EMULATED}

## When not to use it

- A model that fits on the GPU trains faster without offload.
- Small models with accumulation gain nothing without a GPU.
- Several GPUs and a real SSD have not been measured.

## Aims

{aims}

## Runs

{runs}

`python -m benchmarks report` writes this page. [Older rows](reports/2026-11-29-rows.md).
"""
