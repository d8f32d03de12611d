"""Read the machine that a command plans for: a measured profile, or a preset whose figures the user may change."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from perf_model.cli.screen import show, tables
from perf_model.json_input import shorten
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.presets.machines import ALIASES, MACHINES, REACHED_SHARE, MachinePreset, find_machine
from perf_model.units import GB


class Figure(NamedTuple):
    """A figure of a machine that a user may give, its bounds, and the ``field`` of a preset that it replaces."""

    low: float
    high: float
    field: str
    meaning: str


FIGURES = {
    "cores": Figure(1, 10**5, "cores", "cores of a node"),
    "host_bandwidth_gb_per_s": Figure(1, 2500, "host_bytes_per_s", "bandwidth of a node's host memory that is reached"),
    "link_gb_per_s": Figure(0.3, 2000, "link_bytes_per_s", "rate of copies between host and one GPU, per direction"),
    "network_gb_per_s": Figure(1e-3, 1e4, "network_bytes_per_s", "rate at which one GPU receives from other nodes"),
}


def read_machine(options: argparse.Namespace) -> MachinePreset | HardwareProfile:
    """Return the preset with the figures that the user gave, or the profile in the file. Raise ``ProfileError``."""
    changes = {name: value for name in FIGURES if (value := getattr(options, name)) is not None}
    for name, value in changes.items():
        check_figure(f"--{name.replace('_', '-')}", value, FIGURES[name])
    preset = find_machine(options.profile)
    if preset is not None:
        return _changed(preset, changes) if changes else preset
    if changes:
        rule = f"--{next(iter(changes)).replace('_', '-')}: changes a preset, found the profile {options.profile}"
        raise ProfileError(f"{rule}.\nLeave it out, or plan for a preset: {', '.join(MACHINES)}.")
    try:
        return HardwareProfile.read(Path(options.profile))
    except ProfileError as error:
        # Path.exists would raise for a text that no path can be.
        if os.path.exists(options.profile):
            raise
        near = get_close_matches(options.profile.lower(), (*MACHINES, *ALIASES), n=3) or (*MACHINES, *ALIASES)
        figures = ", ".join(f"--{name.replace('_', '-')}" for name in FIGURES)
        raise ProfileError(
            f"{error}\nOr plan for a preset: {', '.join(near)}. plan --list describes all. For another machine, change "
            f"the figures of one: {figures}, --gpu-memory-gb."
        ) from None


def _changed(preset: MachinePreset, changes: dict[str, Any]) -> MachinePreset:
    named = ", ".join(f"{name} {value:g}" for name, value in changes.items())
    values = {FIGURES[name].field: value if name == "cores" else value * GB for name, value in changes.items()}
    if "link_bytes_per_s" in values:
        # A preset contains the specified rate, and the user gives the rate that copies reach.
        values["link_bytes_per_s"] /= REACHED_SHARE
    return replace(preset, source=f"{preset.source}; given by the user: {named}", **values)


def check_figure(key: str, value: float, figure: Figure) -> None:
    """Raise ``ProfileError`` unless ``value`` is inside the bounds of ``figure``."""
    if not figure.low <= value <= figure.high:
        unit = "" if figure.field == "cores" else ", in GB/s"
        rule = f"{key}: must be a number from {figure.low:g} to {figure.high:g}, found {shorten(value)}"
        raise ProfileError(f"{rule}.\nGive the {figure.meaning}{unit}, within these bounds.")


def list_machines() -> None:
    """Print the presets with their figures."""
    headers = ("preset", "GPU", "GPU GB", "peak TFLOPS", "link GB/s", "peers GB/s", "network GB/s")
    rows = []
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
        rows.append((preset.name, preset.gpu, *(f"{figure:,.4g}" for figure in figures)))
    for table in tables((*headers, "cores", "host GB/s", "host GB"), rows, 1, left=headers[:2]):
        show(table)
    names = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    print(f"\nLink, peers and network are per GPU and direction, cores and host per node. {names}.\nSources:")
    for preset in MACHINES.values():
        print(f"  {preset.name}: {preset.source}")
