"""Keep the error of a rank that cannot write a file of a checkpoint or a model until all ranks can raise it.

With stock, the other ranks would wait in a collective for a rank that has raised, and PyTorch's error for a full disk
names neither the file nor the disk.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.internals.compat import checkpoint_writers
from perf_model.units import size


class CheckpointNotSaved(RuntimeError):
    """The error for a file of a checkpoint or a model that could not be written. ``latest`` was not changed."""


class KeptError:
    """The first error of this rank's writes in a save, None if there is none."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def keep(self, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``write``, whose path is its last argument or ``path``, and keep its error. Write nothing after one."""
        if self.error is not None:
            return None
        try:
            return write(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 (``raise_first`` raises it)
            self.error = error
            # PyTorch's writer of archives raises RuntimeError, as do errors that concern no file.
            if isinstance(error, OSError) or "inline_container" in str(error) or isinstance(error.__cause__, OSError):
                self.error = _explained(Path(kwargs["path"] if "path" in kwargs else args[-1]), error)
                self.error.__cause__ = error
        return None

    def raise_first(self) -> None:
        if self.error is not None:
            raise self.error


def save_checkpoint(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.save_checkpoint``. All ranks raise if one could not write a file."""
    # Stock truncates ``latest`` before it writes the tag, which a full disk refuses. It is replaced as a whole here.
    if not _keeps_errors(engine):
        return wrapped(*args, **kwargs)
    engine.optimizer.check_states_on_disk()
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    # A decoupled writer is not finished yet, and writes ``latest`` then.
    writes_latest = call.arguments["save_latest"] and not engine.checkpoint_engine.is_decoupled()
    if writes_latest:
        call.arguments["save_latest"] = False
    with _kept_errors(engine):
        saved = wrapped(*call.args, **call.kwargs)
    if writes_latest:
        folder, tag = (call.arguments[name] for name in ("save_dir", "tag"))
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        raise_together(lambda: _write_latest(Path(folder), tag) if engine.global_rank == 0 else None)
    return saved


def save_16bit_model(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.save_16bit_model``. All ranks raise if rank 0 could not write the file."""
    if not _keeps_errors(engine):
        return wrapped(*args, **kwargs)
    with _kept_errors(engine) as kept:
        saved = wrapped(*args, **kwargs)
    raise_together(kept.raise_first)
    return saved


def _keeps_errors(engine: Any) -> bool:
    """Return whether the optimizer is the plugin's. A script's may answer to any name."""
    return isinstance(getattr(engine.optimizer, "kept_error", None), KeptError)


@contextmanager
def _kept_errors(engine: Any) -> Iterator[KeptError]:
    """Keep the errors of this rank's writes in the body."""
    optimizer = engine.optimizer
    with ExitStack() as replaced:
        # Without what an interrupt may leave in it, which a load would raise.
        replaced.callback(setattr, optimizer, "kept_error", KeptError())
        optimizer.kept_error = kept = KeptError()
        for owner, name in checkpoint_writers(engine):
            attributes = vars(owner)
            before = {name: attributes[name]} if name in attributes else {}
            replaced.callback(attributes.update, before)
            replaced.callback(attributes.pop, name, None)
            attributes[name] = partial(kept.keep, getattr(owner, name))
        yield kept


def _write_latest(folder: Path, tag: str) -> None:
    new = folder / "latest.new"
    try:
        new.write_text(tag)
        new.replace(folder / "latest")
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise _explained(folder / "latest", error) from error


def _explained(path: Path, error: Exception) -> CheckpointNotSaved:
    free = ""
    # A file system that is gone has no free space, and a folder that could not be made is none.
    folder = next((folder for folder in path.parents if os.path.isdir(folder)), Path("/"))
    with suppress(OSError):
        found = os.statvfs(folder)
        free = f", with {size(found.f_bavail * found.f_frsize)} and {found.f_favail:,} files free on its file system"
    return CheckpointNotSaved(
        f"The files of a checkpoint or a model must be written as a whole, found that {path} was not{free}: "
        f"{type(error).__name__}: {error}.\n"
        f"Free space there, or save to another folder that this user may write to and has quota for. Remove what was "
        f"written, which is incomplete. The file latest was not changed, and training can go on."
    )
