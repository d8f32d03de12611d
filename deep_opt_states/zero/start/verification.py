"""Decide about a release of DeepSpeed that was never tried, by its private names and by a tiny training."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import deepspeed
import torch

from deep_opt_states.files import replace_file
from deep_opt_states.names import CONFIG_KEY, __version__
from deep_opt_states.profiler.cache import cached_path
from deep_opt_states.zero.internals.log import log_rank_0
from deep_opt_states.zero.internals.private_names import missing_names
from deep_opt_states.zero.internals.releases import TRIED_DEEPSPEED, is_too_old, is_tried
from deep_opt_states.zero.start.unsupported import Unsupported

TIMEOUT_S = 900
"""DeepSpeed's op may have to be compiled first."""

TRAINING = "deep_opt_states.zero.start.tiny_training"
_SET_PER_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")

_accepted: set[str] = set()
"""The releases that were verified in this process."""


class TrainingUnfinished(RuntimeError):
    """The tiny training could not run to the end, so that nothing is known about the release."""


def release_is_tried() -> bool:
    """Return whether the installed release of DeepSpeed was tried, so that ``verify_release`` does nothing."""
    return is_tried(deepspeed.__version__)


def check_release(untested_deepspeed: str) -> None:
    """Raise ``Unsupported`` for a release of DeepSpeed that is too old, or that its names or the config forbid.

    The latter two only forbid a release that was never tried. ``untested_deepspeed`` is the key of the config. This is
    fast, and one process may call it alone.
    """
    version = deepspeed.__version__
    if is_too_old(version):
        raise Unsupported(
            f'"{CONFIG_KEY}" is enabled, but DeepSpeed must be version {TRIED_DEEPSPEED[0]} or later, '
            f"found {version}.\n"
            f"Install the newest that was tried with pip install deepspeed=={TRIED_DEEPSPEED[-1]}."
        )
    if release_is_tried() or version in _accepted:
        return
    if untested_deepspeed == "refuse":
        raise _refusal(version, '"untested_deepspeed" is "refuse"', [], 'set "untested_deepspeed": "verify", or ')
    if missing := missing_names():
        raise _refusal(version, "it lacks names that the plugin uses", missing)


@contextmanager
def missing_names_are_refused() -> Iterator[None]:
    """Raise ``Unsupported`` if a name is missing inside this context and the release of DeepSpeed was never tried.

    ``check_release`` looks for private names only. Modules and public attributes are found missing when they are used.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        if release_is_tried():
            raise
        raise _refusal(deepspeed.__version__, "it lacks a name that the plugin uses", [str(error)]) from error


def verify_release() -> None:
    """Raise ``Unsupported`` for a release of DeepSpeed that was never tried, unless it has stock's bits.

    One process per machine trains, and the others wait for it and read its result. It is no collective.
    """
    version = deepspeed.__version__
    if release_is_tried() or version in _accepted:
        return
    try:
        found = differences_of(version)
    except TrainingUnfinished as error:
        raise _refusal(
            version, "the tiny training did not finish", [str(error)], "remove that cause and start again, or "
        ) from None
    if found:
        raise _refusal(version, "the tiny training differs from stock", found)
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
def differences_of(version: str) -> list[str]:
    """Return one line for each value of the tiny training that is not equal to stock's.

    The result is cached in a file for each release of DeepSpeed, PyTorch and this package. Raise ``TrainingUnfinished``
    if there is no result; nothing is cached then.
    """
    key = hashlib.sha256(repr((version, torch.__version__, __version__, sys.version)).encode()).hexdigest()[:16]
    path = cached_path(f"verified_{key}", os.environ)
    if path is None:
        return _train()
    # All ranks of a machine come here at once. The first trains, and the others find its result.
    with _locked(path.with_suffix(".lock")):
        found = _read_result(path)
        if found is None:
            found = _train()
            # Without the file, the next rank trains again.
            with suppress(OSError):
                replace_file(path, json.dumps({"differences": found}))
        return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process of this machine into this context at a time, if the file system allows that."""
    with ExitStack() as files:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(files.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _read_result(path: Path) -> list[str] | None:
    """Return the result of an earlier training, or None if there is none."""
    try:
        found = json.loads(path.read_text())["differences"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, list) else None


def _train() -> list[str]:
    """Run the tiny training as one rank on the CPU accelerator, and return the differences."""
    environ = {
        name: value
        for name, value in os.environ.items()
        # With torchrun's variables, the child would look for the store of its launcher.
        if name not in _SET_PER_RANK and not name.startswith("TORCHELASTIC_")
    }
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "DS_ACCELERATOR": "cpu"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", TRAINING], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise TrainingUnfinished(str(error)) from None
    lines = child.stdout.splitlines() or [""]
    found = _differences_in(lines[-1])
    if child.returncode != 0 or found is None:
        ending = (child.stderr.strip().splitlines() or lines)[-1]
        raise TrainingUnfinished(f"exit code {child.returncode}: {ending}")
    return found


def _differences_in(text: str) -> list[str] | None:
    """Return the list of strings that ``text`` has as JSON; None if it has anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(line, str) for line in found) else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _refusal(version: str, why: str, lines: Sequence[str], other_remedy: str = "") -> Unsupported:
    remedy = f"{other_remedy}install one that was tried: pip install deepspeed=={TRIED_DEEPSPEED[-1]}."
    return Unsupported(
        "\n".join(
            [
                f'"{CONFIG_KEY}" is enabled, but DeepSpeed must be a release that was tried '
                f"({', '.join(TRIED_DEEPSPEED)}), or equal stock in a tiny training, found {version}: {why}",
                *(f"  {line}" for line in lines),
                remedy[0].upper() + remedy[1:],
            ]
        )
    )
