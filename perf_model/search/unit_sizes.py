"""Choose the size of the units, together with their plan.

Units end where parameters end, so of all sizes only a few give different units. These *cuts* are the sizes
of the list, and a few sizes next to the best of them. In a window of forward, each cut is explored with a few plans,
and only the most promising cuts are refined. Without one, each cut is planned for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets, DoesNotFit
from perf_model.search.planner import PlannedUpdate, evaluate, order_matters, plan_updates, require_memory
from perf_model.search.use_order import arrange, map_back
from perf_model.search.window_search import WindowSearch

UNIT_SIZES = (
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
)
"""The unit sizes to choose from, in parameters, besides those between them; the last is DeepSpeed's default."""

SIZES_BETWEEN = 2
"""The number of sizes to try between two sizes of the list, at equal ratios and rounded to two digits."""

MAX_USEFUL_UNITS = 600
"""A size with more units is not tried if a larger size fits: each streamed unit adds the latency of six
copies, and each CPU unit that of one."""

MAX_UNITS_BETWEEN = 250
"""A size between those of the list is not tried if it gives more units."""

NEGLIGIBLE_DIFFERENCE = 0.005
"""The relative difference up to which exposed times count as equal. Then smaller units gain nothing."""

NEGLIGIBLE_SHARE = 0.001
"""The share of forward's window up to which exposed time is not worth smaller units."""

FEW_UNITS = 100
"""A size with fewer units does not end the list: smaller units can be much better, because more of them fit."""

LITTLE_GAIN = 0.005
"""A size that gains at most this share over the larger sizes ends the list: no smaller size is tried."""

PROMISING = 1.35
"""The plans of a cut that expose more than this multiple of the least time so far are not explored."""

NARROWED_CUTS = 2
"""The most cuts whose search is narrowed, before the best of them is refined."""

ALMOST_BEST = 1.015
"""A cut whose best explored plan exposes more than this multiple of the least time is not narrowed."""


def plan_units(
    workload_of: Callable[[int], Workload],
    sizes: Iterable[int],
    cost: CostModel,
    budgets: Budgets,
    windows: Windows,
    setup: TrainingSetup,
    first_use_of: Callable[[Workload], tuple[int, ...] | None] | None = None,
) -> tuple[int, PlannedUpdate]:
    """Return the unit size, in parameters, that exposes the least time, and its plan.

    Of sizes whose exposed times differ negligibly, the largest is returned. ``workload_of`` maps a size to the
    units, and ``first_use_of`` maps units to ``Windows.first_use``. Sizes between ``sizes`` are tried, too. Raise
    ``DoesNotFit`` if no plan fits with any size.
    """
    sizes = sorted(set(sizes), reverse=True)

    def first_use(workload: Workload) -> tuple[int, ...] | None:
        return windows.first_use if first_use_of is None else first_use_of(workload)

    def arranged(size: int) -> Workload:
        workload = workload_of(size)
        return arrange(workload, first_use(workload))

    cuts = _Cuts(arranged, cost, budgets, replace(windows, first_use=None), setup)
    for size in sizes:
        if cuts.smaller_units_gain_nothing:
            break
        cuts.try_size(size, limit=MAX_USEFUL_UNITS)
    best = cuts.best_size()
    for pair in pairwise(sizes):
        for size in _between(*pair) if best in pair and not cuts.exposes_hardly_anything else ():
            cuts.try_size(size, limit=MAX_UNITS_BETWEEN)
    size, plan = cuts.choose()
    workload = workload_of(size)
    ordered = replace(windows, first_use=first_use(workload))
    planned = evaluate(map_back(plan, workload, ordered.first_use), cost, budgets, ordered, setup)
    return size, replace(planned, simulations=cuts.simulated)


def _between(larger: int, smaller: int) -> list[int]:
    """Return sizes between two sizes, the largest first."""
    ratios = ((smaller / larger) ** (step / (SIZES_BETWEEN + 1)) for step in range(1, SIZES_BETWEEN + 1))
    return [int(float(f"{larger * ratio:.1e}")) for ratio in ratios]


class _Cuts:
    """The sizes that give different units, with the searches or the plans for them."""

    def __init__(
        self,
        workload_of: Callable[[int], Workload],
        cost: CostModel,
        budgets: Budgets,
        windows: Windows,
        setup: TrainingSetup,
    ) -> None:
        self._workload_of = workload_of
        self._cost = cost
        self._budgets = budgets
        self._windows = windows
        self._setup = setup
        self._known: set[Workload] = set()
        self._errors: list[DoesNotFit] = []
        self._planned: dict[int, PlannedUpdate] = {}
        self._searches: dict[int, WindowSearch] = {}
        self._every_search: list[WindowSearch] = []
        self._ends_list = False
        self._numel = 0
        """The parameters of the workload. A size that gives too many units is left out before anything is cut."""

    @property
    def simulated(self) -> int:
        """Return the number of plans that were simulated, of all sizes."""
        planned = sum(planned.simulations for planned in self._planned.values())
        return planned + sum(search.simulated for search in self._every_search)

    @property
    def exposes_hardly_anything(self) -> bool:
        """Return whether the exposed time of the best size is negligible."""
        return self._least_s() <= NEGLIGIBLE_SHARE * self._windows.forward_s

    @property
    def smaller_units_gain_nothing(self) -> bool:
        """Return whether the best size is good enough, or the latest size gained little over the larger ones."""
        return self.exposes_hardly_anything or self._ends_list

    def try_size(self, size: int, limit: int) -> None:
        """Explore or plan for ``size``, unless its units are known or, if another size fits, above ``limit``."""
        fits = self._planned or self._searches
        if fits and self._numel > limit * size:
            return
        workload = self._workload_of(size)
        self._numel = workload.numel
        if workload in self._known or (fits and len(workload.units) > limit):
            return
        self._known.add(workload)
        before_s = self._least_s()
        try:
            require_memory(workload, self._cost, self._budgets, self._setup)
        except DoesNotFit as error:
            self._errors.append(error)
            return
        if self._windows.forward_s > 0.0 and not self._cost.blocks:
            search = WindowSearch(workload, self._cost, self._budgets, self._windows, self._setup)
            search.explore(PROMISING * self._least_s(), self._best_search())
            self._every_search.append(search)
            if search.best is not None:
                self._searches[size] = search
        if not self._searches:
            self._planned[size] = plan_updates(workload, self._cost, self._budgets, self._windows, self._setup)
        gains_little = self._least_s() >= (1 - LITTLE_GAIN) * before_s
        self._ends_list = gains_little and len(workload.units) >= FEW_UNITS

    def best_size(self) -> int:
        """Return the size with the least exposed time so far. Raise ``DoesNotFit`` if no size fits."""
        exposed_s = self._exposed_s()
        if not exposed_s:
            raise min(self._errors, key=lambda error: sum(error.missing.values()))
        return min(exposed_s, key=lambda size: exposed_s[size])

    def choose(self) -> tuple[int, UpdatePlan]:
        """Narrow the most promising sizes, refine the best of them, and return its size and its plan."""
        explored_s = self._exposed_s()
        almost_best = [size for size in self._searches if explored_s[size] <= ALMOST_BEST * self._least_s()]
        for size in sorted(almost_best, key=lambda size: explored_s[size])[:NARROWED_CUTS]:
            self._narrow(size)
        enough_s = (1 + NEGLIGIBLE_DIFFERENCE) * self._least_s()
        chosen = [size for size in sorted(self._exposed_s(), reverse=True) if self._exposed_s()[size] <= enough_s]
        for size in chosen:
            if size in self._searches:
                self._searches[size].refine()
            if (plan := self._plan(size)) is not None:
                return size, plan
        raise AssertionError("the best size has a plan")

    def _narrow(self, size: int) -> None:
        """Narrow the search of ``size``; with few units, plan for it again."""
        search = self._searches[size]
        if order_matters(search.workload, self._cost, self._windows):
            search.narrow()
        else:
            del self._searches[size]
            self._planned[size] = plan_updates(search.workload, self._cost, self._budgets, self._windows, self._setup)

    def _plan(self, size: int) -> UpdatePlan | None:
        return self._planned[size].plan if size in self._planned else self._searches[size].result()

    def _exposed_s(self) -> dict[int, float]:
        searched = {size: search.best.seconds[0] for size, search in self._searches.items() if search.best is not None}
        return searched | {size: planned.exposed_s for size, planned in self._planned.items()}

    def _best_search(self) -> WindowSearch | None:
        """Return the search that exposes the least time so far; None if there is none."""
        exposed_s = self._exposed_s()
        return self._searches[min(self._searches, key=lambda size: exposed_s[size])] if self._searches else None

    def _least_s(self) -> float:
        return min(self._exposed_s().values(), default=float("inf"))
