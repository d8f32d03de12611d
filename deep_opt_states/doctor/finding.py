"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    OK = "OK"
    WARN = "WARN"
    """Training starts, but not as it could."""
    FAIL = "FAIL"
    """Training cannot start, or would start without the plugin although the config asks for it."""


@dataclass(frozen=True)
class Finding:
    """``found`` holds the value and, where it breaks a rule, the rule; ``remedy`` is empty if and only if it is OK."""

    topic: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.status is Status.OK) == (not self.remedy), self
