"""Decide which states are on disk, by the host memory that is free, and measure the disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from deep_opt_states import log
from deep_opt_states.config import Config, ConfigError
from deep_opt_states.device.state_file import DiskError, check_free_space
from deep_opt_states.host import machine
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.profiler.disk import MEASURED_BYTES, doubts, measure_disks
from deep_opt_states.profiler.ranks import Ranks
from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.start.node_share import SharingRanks, free_share_bytes
from perf_model.prediction.cost import CostModel, DiskRates
from perf_model.schedule.cutting import place_on_disk
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.workload import Partition, Workload
from perf_model.units import GB, size

HOST_MARGIN = 0.1
"""The share of a node's memory that stays free, for data loaders, checkpoints and the page cache."""


def with_nvme_path(config: Config, offload: Any) -> Config:
    """Return ``config`` with all folders in ``nvme_paths``. Raise ``ConfigError`` for keys that need NVMe."""
    if offload.device == OffloadDeviceEnum.nvme:
        return config.model_copy(update={"nvme_paths": [str(offload.nvme_path), *(config.nvme_paths or [])]})
    for key in ("nvme_paths", "host_memory_gb"):
        if (value := getattr(config, key)) is not None:
            raise ConfigError(
                f'{CONFIG_KEY}.{key}: belongs to "device": "nvme" in "offload_optimizer", found {value}.\n'
                f'Remove the key, or set "device": "nvme" and "nvme_path".'
            )
    return config


def check_folders(config: Config) -> list[str]:
    """Return doubts about the folders of ``nvme_paths``. Raise ``ConfigError`` for one that cannot hold states."""
    try:
        return doubts([Path(path) for path in config.nvme_paths or []])
    except DiskError as error:
        raise ConfigError(str(error)) from error


def choose_states_on_disk(
    config: Config, sub_groups: Sequence[Sequence[Partition]], widths: Widths, ranks: SharingRanks
) -> list[list[Partition]]:
    """Place the states on disk that do not fit into host memory. Raise ``DiskError``. This is a collective."""
    if not config.nvme_paths:
        return [list(partitions) for partitions in sub_groups]
    if config.host_memory_gb is None:
        free_bytes = free_share_bytes(ranks) - int(HOST_MARGIN * machine.memory().usable_bytes / ranks.on_node)
    else:
        free_bytes = int(config.host_memory_gb * GB / ranks.on_node)
    host_bytes = max(0, min(Ranks().gather(free_bytes)))
    placed = place_on_disk(sub_groups, widths, host_bytes, config.rules.placement_of, config.disk_unit_size)
    partitions = list(chain.from_iterable(placed))
    numel = sum(partition.numel for partition in partitions if partition.is_on_disk)
    kept_bytes = sum(partition.numel for partition in partitions) * sum(widths.on_host.values()) - numel * widths.states
    # A limit of 0 asks for as little as possible.
    if kept_bytes > host_bytes and config.host_memory_gb != 0:
        source = "free" if config.host_memory_gb is None else 'allowed by "host_memory_gb"'
        log.warn(
            f"gradients and states that are never on disk need {size(kept_bytes)} of host memory per rank, found "
            f"{size(host_bytes)} {source}: training may run out of host memory. Use more "
            'nodes, or set a larger "host_memory_gb"'
        )
    folders = [Path(path) for path in config.nvme_paths]
    # Before the states, a measurement takes space on all ranks at the same time.
    each_bytes = max(-(-numel * widths.states // len(folders)), MEASURED_BYTES if numel else 0)
    raise_together(lambda: check_free_space(folders, each_bytes, ranks.on_node))
    for doubt in sorted(set(chain(*Ranks().gather(raise_together(lambda: doubts(folders)))))):
        log.warn(doubt)
    if numel == 0:
        log.info(f"no states are on disk: all fit into {size(host_bytes)} of host memory per rank")
    return placed


def with_disks(
    config: Config, cost: CostModel, workload: Workload, widths: Widths, note: Callable[[str], None]
) -> CostModel:
    """Return ``cost`` with the rates of this rank's disks while all use theirs, and ``note`` them: a collective."""
    if not workload.on_disk_numel:
        return cost
    folders = [Path(path) for path in config.nvme_paths or []]
    measured = Ranks().gather(raise_together(lambda: measure_disks(folders)))
    rates = DiskRates(*(min(values) for values in zip(*measured, strict=True)))
    note(
        f"{size(workload.on_disk_numel * widths.states)} of states per rank are in {', '.join(map(str, folders))}: "
        f"{size(int(rates.read))}/s read, {size(int(rates.write))}/s written, {size(int(rates.both))}/s both together."
    )
    return cost.with_disk(rates, widths)
