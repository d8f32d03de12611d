"""Which placement of the units exposes the least time within the memory budgets?

Begin with ``planner.py``. It simulates candidate placements; ``bounds.py`` and ``pruning.py`` rule candidates out
without a simulation, and ``spread.py`` makes candidates.
"""
