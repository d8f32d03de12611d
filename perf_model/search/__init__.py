"""Which placement of the units exposes the least time within the memory budgets?

Begin with ``planner.py``. ``placement_search.py`` and ``window_search.py`` simulate candidates, which
``starting_points.py`` and ``ramps.py`` make. ``bounds.py`` and ``pruning.py`` rule candidates out without a simulation.
"""
