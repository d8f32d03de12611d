"""Register the profiles of Hypothesis. No profile has a deadline: it would assert a duration, on shared machines.

``make test`` has the profile ``quick``, with a fourth of the examples of ``make test-all``, new ones in each run.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
# Without a database, a seed repeats a failure on any machine.
settings.register_profile("stress", deadline=None, max_examples=500, database=None)
settings.load_profile("untimed")
