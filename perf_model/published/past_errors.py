"""Define ``LARGER_MODELS``: how far predicted iterations of published runs were off."""

from __future__ import annotations

from perf_model.published.errors import ErrorSummary

LARGER_MODELS = ErrorSummary(45, 0.038, 0.168)
"""The absolute relative errors of the iterations that the rules of ``plan`` predict for runs that were not fitted,
printed by ``python -m perf_model validate --runs benchmarks/data/published_runs.csv --across-models``. The rates were
fitted on smaller models on the same machine. A test computes them again."""
