"""Define the finding, which is the result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """The severity of a finding."""

    OK = "OK"
    WARN = "WARN"
    """Training can start, but may be slower than possible."""
    FAIL = "FAIL"
    """Training cannot start, or would start without the plugin although the config enables it."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    topic: str
    """The thing that was checked, such as ``"cores"``."""
    status: Status
    found: str
    """The value found and, if it breaks a rule, the rule."""
    remedy: str = ""
    """The change that the user can make. Empty if and only if the status is OK."""

    def __post_init__(self) -> None:
        assert (self.status is Status.OK) == (not self.remedy), self
