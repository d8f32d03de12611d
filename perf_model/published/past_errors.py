"""Define ``LARGER_MODELS``: how far predicted iterations of published runs were off."""

from __future__ import annotations

from perf_model.published.errors import ErrorSummary

LARGER_MODELS = ErrorSummary(60, 0.027, 0.090)
"""The absolute relative errors of the predicted iterations of runs that were not fitted, printed by
``python -m perf_model validate --runs benchmarks/data/published_runs.csv --across-models``. The rates were fitted on
smaller models on the same machine. A test computes them again."""
