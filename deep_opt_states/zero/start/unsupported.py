"""Define the error that refuses what the plugin does not support."""

from __future__ import annotations


class Unsupported(ValueError):
    """The error for a feature, or a release of DeepSpeed, that the enabled plugin does not support."""
