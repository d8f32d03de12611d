"""Replace a file so that a concurrent reader never sees a partial text."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Replace ``path`` by a file with ``text``. Raise ``OSError``, with ``path`` unchanged, if it cannot be written."""
    # Only this user could read a file of ``tempfile``. Processes on nodes that share the folder may have the same pid.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
