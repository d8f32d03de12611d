"""Replace a file so that a concurrent reader never sees a partial text."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to a file next to ``path``, and then rename that file to ``path``.

    A process that reads ``path`` at the same time finds either all of the old or all of the new text. Raise ``OSError``
    if the text cannot be written; ``path`` is unchanged then.
    """
    # A file from ``tempfile`` is not used, because only this user could read it. The file's name contains the node's
    # name, because processes on nodes that share the folder may have the same pid.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
