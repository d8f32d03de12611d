"""Reward texts of ms-swift's GRPO by the number of different characters; ``--external_plugins`` loads this file."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class DifferentCharacters(ORM):
    """A reward that differs between random texts."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]


orms["different_characters"] = DifferentCharacters
