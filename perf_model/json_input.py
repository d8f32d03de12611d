"""Read the files of users: regular files of bounded size, JSON without duplicate keys, and texts to be printed."""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from collections import Counter
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 10_000_000
"""The size of the largest file that is read: a profile, a model's config, rules or runs. Real ones are below 1 MB."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 60

_SURROGATES = re.compile("[\ud800-\udfff]")


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the UTF-8 text of the regular file ``path``.

    Raise ``OSError`` or ``ValueError`` if it cannot be read as such, is no regular file or exceeds ``max_bytes``.
    """
    # Without O_NONBLOCK, opening a FIFO waits until a process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        size = f"{max_bytes / 1e6:,.0f} MB" if max_bytes >= 10**6 else f"{max_bytes / 1e3:,.0f} kB"
        raise ValueError(f"it has more than {size}")
    # Some editors write a byte order mark, which is not part of the text.
    return content.decode("utf-8-sig")


def parse_json(text: str) -> Any:
    """Return the value that ``text`` spells.

    Raise ``ValueError`` if it is not JSON, is nested too deeply, or has an object with a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {shorten(twice)} occurs twice in one object")
    return found


def reason(error: OSError | ValueError) -> str:
    """Return the reason why a file cannot be read, without the name of the file."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def shorten(value: object) -> str:
    """Return ``repr(value)`` for an error message, shortened if it is long."""
    try:
        return printable(_SHORT.repr(value))
    except ValueError:
        # Python refuses to print an integer of more than 4,300 digits.
        return "an integer of thousands of digits"


def printable(text: object, most: int | None = None) -> str:
    """Return ``text`` with escapes such as ``\\x1b`` for characters that are not printable, as in ``repr``.

    A terminal interprets control characters: a name could clear the screen. A text of more than ``most`` characters
    keeps its beginning and its end, about ``most`` characters in all.
    """
    characters = str(text)
    if most is not None and len(characters) > most:
        left, right = most * 2 // 3, most // 3
        left_out = f"[... {len(characters) - left - right:,} characters ...]"
        characters = f"{characters[:left]}{left_out}{characters[-right:]}"
    if characters.isprintable():
        return characters
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in characters)


def is_unicode(text: str) -> bool:
    """Return whether ``text`` has no lone surrogates: JSON allows them, UTF-8 output does not."""
    return _SURROGATES.search(text) is None
