"""Decide about a release of DeepSpeed that was never tried, by its private names and by a tiny training."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import deepspeed
import torch

from deep_opt_states.files import replace_file
from deep_opt_states.names import CONFIG_KEY, __version__
from deep_opt_states.profiler.cache import cached_path
from deep_opt_states.zero.internals.log import log_rank_0
from deep_opt_states.zero.internals.private_names import missing_names
from deep_opt_states.zero.internals.releases import TRIED_DEEPSPEED, is_tried
from deep_opt_states.zero.start.refusals import Unsupported

TIMEOUT_S = 900
"""DeepSpeed's op may have to be compiled first."""

TRAINING = "deep_opt_states.zero.start.tiny_training"
_SET_PER_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")

_accepted: set[str] = set()
"""The releases that were verified in this process."""


def check_release(untested_deepspeed: str) -> None:
    """Raise ``Unsupported`` for a release of DeepSpeed that was never tried and must not be used.

    ``untested_deepspeed`` is the key of the config. Every rank calls this; one rank per machine verifies, and the
    others wait for it and read its result.
    """
    version = deepspeed.__version__
    if is_tried(version) or version in _accepted:
        return
    if untested_deepspeed == "refuse":
        raise _refusal(version, '"untested_deepspeed": "refuse" accepts only releases that were tried')
    if found := what_differs(version):
        raise _refusal(version, "it is not equal to stock there:\n" + "\n".join(f"  {line}" for line in found))
    _accepted.add(version)
    log_rank_0(
        f"DeepSpeed {version} was never tried with this release. A tiny model had the bits of stock, so training goes "
        f'on; other features may differ. To refuse such releases, set "untested_deepspeed": "refuse".'
    )


@contextmanager
def release_is_accepted() -> Iterator[None]:
    """Accept the installed release inside this context: the tiny training itself must not verify it again."""
    _accepted.add(deepspeed.__version__)
    try:
        yield
    finally:
        _accepted.discard(deepspeed.__version__)


@cache
def what_differs(version: str) -> list[str]:
    """Return one line for each private name that is missing, or else for each value that is not equal to stock's.

    The result of the tiny training is cached in a file for each release of DeepSpeed, PyTorch and this package.
    """
    if missing := missing_names():
        return missing
    key = hashlib.sha256(repr((version, torch.__version__, __version__, sys.version)).encode()).hexdigest()[:16]
    path = cached_path(f"verified_{key}", os.environ)
    if path is None:
        return _train()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError:
        return _train()
    with lock:
        # All ranks of a machine come here at once. The first trains, and the others find its result.
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _read_result(path)
        if found is None:
            found = _train()
            replace_file(path, json.dumps({"differences": found}))
        return found


def _read_result(path: Path) -> list[str] | None:
    """Return the result of an earlier training, or None if there is none."""
    try:
        found = json.loads(path.read_text())["differences"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, list) else None


def _train() -> list[str]:
    """Run the tiny training as one rank on the CPU accelerator, and return what differs."""
    environ = {name: value for name, value in os.environ.items() if name not in _SET_PER_RANK}
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "DS_ACCELERATOR": "cpu"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", TRAINING], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [f"the tiny training cannot run: {error}"]
    lines = child.stdout.splitlines() or [""]
    try:
        found: list[str] = json.loads(lines[-1])
    except ValueError:
        ending = (child.stderr.strip().splitlines() or lines)[-1]
        return [f"the tiny training failed with exit code {child.returncode}: {ending}"]
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _refusal(version: str, why: str) -> Unsupported:
    return Unsupported(
        f'"{CONFIG_KEY}" is enabled, but DeepSpeed must be a release that was tried ({", ".join(TRIED_DEEPSPEED)}) '
        f"or that equals stock on a tiny model, found {version}; {why}\n"
        f"Install one that was tried with pip install deepspeed=={TRIED_DEEPSPEED[-1]}."
    )
