"""How long hypothesis looks. A deadline would be a timed assertion, on machines that are shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
# A seed must repeat what it found on a machine that has not seen it.
settings.register_profile("stress", deadline=None, max_examples=500, database=None)
settings.load_profile("untimed")
