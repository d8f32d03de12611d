"""Read the machine that a command plans for: a measured profile, or a preset, with figures of the user's."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from perf_model.json_input import shorten
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.presets.machines import ALIASES, MACHINES, REACHED_SHARE, MachinePreset, find_machine
from perf_model.units import GB


class MachineFigure(NamedTuple):
    """A figure of a machine that a user may give, with its bounds."""

    low: float
    high: float
    meaning: str


FIGURES = {
    "cores": MachineFigure(1, 10**5, "cores of a node"),
    "host_bandwidth_gb_per_s": MachineFigure(1, 2500, "bandwidth of a node's host memory that is reached, in GB/s"),
    "link_gb_per_s": MachineFigure(0.3, 2000, "rate of copies between host and one GPU, per direction, in GB/s"),
    "network_gb_per_s": MachineFigure(1e-3, 1e4, "rate at which one GPU receives from other nodes, in GB/s"),
}
"""The figures of a preset that options replace, by the name of the option."""


def read_machine(options: argparse.Namespace) -> MachinePreset | HardwareProfile:
    """Return the preset of ``--profile`` with the figures of other options, or the profile in that file.

    Raise ``ProfileError`` if there is none, or if a figure is impossible.
    """
    changes = {name: value for name in FIGURES if (value := getattr(options, name)) is not None}
    for name, value in changes.items():
        check_figure(f"--{name.replace('_', '-')}", value, FIGURES[name])
    preset = find_machine(options.profile)
    if preset is not None:
        return _changed(preset, changes)
    if changes:
        rule = f"--{next(iter(changes)).replace('_', '-')}: changes a preset, found the profile {options.profile}"
        raise ProfileError(f"{rule}.\nLeave it out, or plan for a preset: {', '.join(MACHINES)}.")
    try:
        return HardwareProfile.read(Path(options.profile))
    except ProfileError as error:
        # Path.exists would raise for a text that no path can be.
        if os.path.exists(options.profile):
            raise
        near = get_close_matches(options.profile.lower(), (*MACHINES, *ALIASES), n=3) or MACHINES
        raise ProfileError(f"{error}\nOr plan for a preset: {', '.join(near)}. plan --list describes all.") from None


def _changed(preset: MachinePreset, changes: dict[str, Any]) -> MachinePreset:
    """Return ``preset`` with these figures, and with a source that names them."""
    if not changes:
        return preset
    named = ", ".join(f"{name} {value:g}" for name, value in changes.items())
    values: dict[str, Any] = {"source": f"{preset.source}; given by the user: {named}"}
    if "cores" in changes:
        values["cores"] = changes["cores"]
    if "host_bandwidth_gb_per_s" in changes:
        values["host_bytes_per_s"] = changes["host_bandwidth_gb_per_s"] * GB
    if "link_gb_per_s" in changes:
        # A preset contains the specified rate, and the user gives the rate that copies reach.
        values["link_bytes_per_s"] = changes["link_gb_per_s"] * GB / REACHED_SHARE
    if "network_gb_per_s" in changes:
        values["network_bytes_per_s"] = changes["network_gb_per_s"] * GB
    return replace(preset, **values)


def check_figure(key: str, value: float, figure: MachineFigure) -> None:
    """Raise ``ProfileError`` unless ``value`` is inside the bounds of ``figure``."""
    if not figure.low <= value <= figure.high:
        rule = f"{key}: must be a number from {figure.low:g} to {figure.high:g}, found {shorten(value)}"
        raise ProfileError(f"{rule}.\nGive the {figure.meaning}, within these bounds.")


def list_machines() -> None:
    """Print the presets with their figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    headers = ("preset", "GPU", "GPU GB", "peak TFLOPS", "link GB/s", "peers GB/s", "network GB/s")
    for header in (*headers, "cores", "host GB/s", "host GB"):
        table.add_column(header, justify="left" if header in ("preset", "GPU") else "right", no_wrap=True)
    for preset in MACHINES.values():
        figures = (
            preset.gpu_memory_bytes / GB,
            preset.peak_flops / 1e12,
            REACHED_SHARE * preset.link_bytes_per_s / GB,
            preset.peer_bytes_per_s / GB,
            preset.network_bytes_per_s / GB,
            preset.cores,
            preset.host_bytes_per_s / GB,
            preset.host_memory_bytes / GB,
        )
        table.add_row(preset.name, preset.gpu, *(f"{figure:,.4g}" for figure in figures))
    Console(width=140).print(table)
    names = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    print(f"\nLink, peers and network are per GPU and direction, cores and host per node. {names}.\nSources:")
    for preset in MACHINES.values():
        print(f"  {preset.name}: {preset.source}")
