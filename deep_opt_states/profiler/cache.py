"""Quick profiles by fingerprint, in the user's cache folder, so that only the first training run measures."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.device.kernels.triton_adam import triton_version
from deep_opt_states.profiler.adam_kernels import CpuAdam, training_cpu_adam, training_gpu_adam
from deep_opt_states.profiler.measure import measure
from deep_opt_states.profiler.method import QUICK, Effort
from deep_opt_states.profiler.provenance import describe, fingerprint, smallest_node
from deep_opt_states.profiler.ranks import Ranks, agree
from perf_model.prediction.hardware import HardwareProfile, ProfileError


def quick_profile(
    device: Device[Any] | None,
    ranks: Ranks,
    log: Callable[[str], None],
    *,
    threads: int,
    cores: Sequence[int] = (),
    cpu_adam: CpuAdam = training_cpu_adam,
    device_adam: Callable[[], AdamKernel] = training_gpu_adam,
    effort: Effort = QUICK,
) -> HardwareProfile:
    """Rank 0's cached profile for such a machine, or one that all ranks measure now; the same on all. A collective.

    ``log`` is called on rank 0 only. The rest is ``measure``'s, and so is what is raised; the cache raises nothing.
    """
    node = smallest_node(ranks, os.environ)

    def look_up() -> tuple[Path | None, str | None]:
        if ranks.rank > 0:
            return None, None
        names = map(_name, (type(device), cpu_adam, device_adam))
        # What was waived for want of Triton is measured once it is there.
        works_with = " ".join([*names, triton_version(), "pinned threads" if cores else ""])
        provenance = describe(on_accelerator=device is not None, node=node, threads=threads)
        path = cached_path(fingerprint(provenance, node, effort, ranks.size, works_with), os.environ)
        return path, _read(path)

    path, found = agree(ranks, look_up)
    found = ranks.gather(found)[0]
    if found is not None:
        profile = HardwareProfile.from_json(found)
        if ranks.rank == 0:
            log(f"Hardware profile of {profile.provenance.date}, from {path}.")
        return profile
    if ranks.rank == 0:
        log("No hardware profile for this machine yet: measuring a quick one.")
    profile = measure(device, ranks, effort, threads=threads, cores=cores, cpu_adam=cpu_adam, device_adam=device_adam)
    if ranks.rank == 0:
        _keep(profile, path, log)
    return profile


def cached_path(fingerprint: str, environ: Mapping[str, str]) -> Path | None:
    """None for a user without a home."""
    # The XDG specification: a path that is not absolute is to be ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "deep_opt_states" / f"{fingerprint}.json"


def replace_file(path: Path, text: str) -> None:
    """Whoever reads meanwhile finds all of the old or all of the new text. Raises ``OSError``."""
    # Not of ``tempfile``, which would keep the file from everybody else. Nodes that share a home may share a pid.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _read(path: Path | None) -> str | None:
    """The text of a profile; None, as if there were none, for whatever cannot be used."""
    if path is None:
        return None
    try:
        return HardwareProfile.read(path).to_json()
    except ProfileError:
        return None


def _keep(profile: HardwareProfile, path: Path | None, log: Callable[[str], None]) -> None:
    if path is None:
        log("The hardware profile is not cached: this user has no home folder, and XDG_CACHE_HOME is not set.")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, profile.to_json())
    except OSError as error:
        log(f"The hardware profile is not cached: {error}. Set XDG_CACHE_HOME to a folder that can be written.")


def _name(made_by: Any) -> str:
    return f"{made_by.__module__}.{made_by.__qualname__}"
