"""Search for the plan with the least exposed time in a window of forward, where the places of units matter.

The search simulates many plans at once (``simulate_many.py``), in three parts:

1. ``explore`` simulates the simple rules of ``starting_points.py`` and the gradual ones of ``ramps.py``. If larger
   units of the same parameters were explored, only the best ramps of those are simulated.
2. ``narrow`` simulates ramps with CPU shares close to those of the best ramps, and the best ramps varied at random.
   Where forward hides almost all the work, one unit in a hundred on another lane can double the exposed time, and the
   shares of ``explore`` are farther apart.
3. ``refine`` changes the best plans by moves, swaps and shifts (``moves.py``). It begins with several plans, the best
   ones for different numbers of slots, and keeps fewer in each round. The first round also varies the best ramps once
   more and fills the memory that the best plans leave (``fill.py``). The others also try the moves together that helped
   one plan.

A batch of few plans takes almost as long as one of many, so each part simulates few batches.

The random changes are drawn with a fixed seed, so the result depends on nothing but the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from random import Random

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.prediction.lane_queues import CODES, Integers, encode
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate_many import ManySimulator
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import exposed_bound, first_needed_bound
from perf_model.search.budgets import Budgets
from perf_model.search.candidates import Candidate, best_by_slots, best_first
from perf_model.search.capacity import ResidentCapacity
from perf_model.search.fill import MemoryFiller
from perf_model.search.memory_check import MemoryCheck
from perf_model.search.moves import Move, apply_together, draw_moves
from perf_model.search.placed_ramps import PlacedRamps, Plan, PlanKey, key_of
from perf_model.search.pruning import TimeLowerBounds
from perf_model.search.ramps import Ramp, adapt, nearby, ramps, vary
from perf_model.search.starting_points import MAX_SLOTS, StartingPoints

MAX_ROUNDS = 12
"""The most rounds of moves."""

FIRST_LEADERS = 6
"""The number of plans that the first round changes; each round changes one less, and the last ones change the best."""

FILLED_LEADERS = 2
"""The number of plans whose memory is filled."""

LITTLE = 0.002
"""The relative gain up to which a round was in vain, so that no round follows."""

PLANS_PER_ROUND = 256
"""The number of moves that a round simulates."""

MAX_EXPLORED = 160
"""The most plans that ``explore`` simulates."""

MAX_REFINED_UNITS = 1_000
"""The most units in the rounds after the first one, so that many units do not take much longer."""

MAX_UNITS_PER_ROUND = 60_000
"""The most units in all plans of one round."""

MANY_UNITS = 300
"""With more units, the simulation counts the latency of a copy as work, so that a plan has fewer events."""

MAX_UNITS_EXPLORED = 100
"""The most units with which every rule is explored, even if the best ramps of larger units are known."""

EXPLORED_AGAIN = 24
"""The most ramps of larger units that are explored, for each number of slots, and the fewest that suffice."""

NARROWED_RAMPS = 3
"""The most ramps that ``narrow`` begins with."""

SCALES = (0.1, 0.03)
"""The scales by which ``narrow`` and ``refine`` vary the best ramps."""

VARIED_RAMPS = 6
"""The most ramps that are varied at a time."""

PLANS_PER_SCALE = 60
"""The number of varied ramps."""

ALMOST = 1.02
"""Varied ramps that expose up to this multiple of the least time are kept: the next change may improve them."""

ENOUGH = 1.001
"""A plan whose exposed time is at most this multiple of the lower bound is not refined."""

MOVES_TOGETHER = 16
"""The most moves that are tried together."""

PLACEMENTS = tuple(Placement)


class WindowSearch:
    """A search for one workload.

    ``best`` is the best plan so far, None if every plan was ruled out.
    """

    def __init__(
        self, workload: Workload, cost: CostModel, budgets: Budgets, windows: Windows, setup: TrainingSetup
    ) -> None:
        self.best: Candidate | None = None
        self.workload = workload
        self._cost = cost
        self._budgets = budgets
        self._setup = setup
        self._free = [unit.index for unit in workload.units if unit.fixed is None]
        many = len(workload.units) > MANY_UNITS
        self._simulator = ManySimulator(workload, cost, windows, latency_is_work=many)
        self._bounds = TimeLowerBounds(workload, cost, windows)
        self._memory = MemoryCheck(workload, budgets.gpu_bytes, setup)
        self._filler = MemoryFiller(workload, self._memory, setup)
        self._found: dict[PlanKey, Candidate] = {}
        self._ramps = PlacedRamps(workload, budgets.gpu_bytes, setup, self._memory)
        self._random = Random(0)
        capacity = ResidentCapacity.from_gpu_bytes(workload, budgets.gpu_bytes, setup)
        self._bound = exposed_bound(workload.numel, cost, windows, capacity)
        self._bound_s = max(self._bound.seconds, first_needed_bound(workload, cost, windows, capacity).seconds)

    @property
    def simulated(self) -> int:
        """Return the number of plans that were simulated."""
        return self._simulator.simulated

    def explore(self, enough_s: float = np.inf, larger: WindowSearch | None = None) -> None:
        """Simulate simple and gradual rules, except those that are known to expose at least ``enough_s``.

        ``larger`` is the search of larger units, if there is one: its best ramps are probably good for these units.
        """
        adapted = self._adapted(larger) if larger is not None else []
        self._try(adapted or self._every_rule(), enough_s, MAX_EXPLORED)

    def narrow(self) -> None:
        """Simulate ramps with CPU shares close to those of the best for each number of slots, and varied ones."""
        if self.best is None or self._good_enough:
            return
        leaders = best_by_slots(self._best_ramps(), 1)[:NARROWED_RAMPS]
        if leaders:
            chosen = [near for ramp in self._ramps_of(leaders) for near in nearby(ramp)]
            enough_s = max(leaders[-1].seconds[0], self.best.seconds[0] * ALMOST)
            self._try(self._ramps.place([*chosen, *self._varied(SCALES[0])], tightly=True), enough_s)

    def refine(self) -> None:
        """Vary the best ramps, fill the memory of the best plans, and try moves until a round gains next to nothing."""
        if self.best is None or self._good_enough:
            return
        # The first round simulates these plans, too: few plans take almost as long as many.
        together = self._ramps.place(self._varied(SCALES[1]), tightly=True)
        if self._fills:
            together += [plan for leader in self._leaders()[:FILLED_LEADERS] for plan in self._filled(leader)]
        possible = 1 + MAX_REFINED_UNITS // len(self.workload.units)
        for number in range(min(possible, MAX_ROUNDS)):
            if self._good_enough:
                return
            before_s = self.best.seconds[0]
            together = self._refine_once(self._leaders()[: max(1, FIRST_LEADERS - number)], together)
            if self.best.seconds[0] >= (1 - LITTLE) * before_s:
                return

    def _varied(self, scale: float) -> list[Ramp]:
        """Return the best ramps, varied at random by ``scale``."""
        best = self._ramps_of(self._best_ramps()[:VARIED_RAMPS])
        return [vary(ramp, scale, self._random) for ramp in best for _ in range(PLANS_PER_SCALE // len(best))]

    def result(self) -> UpdatePlan | None:
        """Return the best plan, with as few slots as do not take longer; None if no plan that was tried fits."""
        if self.best is not None:
            placements = self._plan(self.best.codes, self.best.num_slots).placements
            fewer = [
                (self.best.codes, num_slots)
                for num_slots in range(1, self.best.num_slots)
                if self._bounds.exposed_s_with_slots(placements, num_slots) <= self.best.seconds[0]
            ]
            self._try(fewer, np.nextafter(self.best.seconds[0], np.inf))
        for candidate in sorted(self._found.values(), key=lambda found: (found.seconds, found.num_slots)):
            plan = self._plan(candidate.codes, candidate.num_slots)
            if not self._budgets.missing(memory_of(plan, self._setup)):
                return plan
        return None

    def _adapted(self, larger: WindowSearch) -> list[Plan]:
        """Return the plans of the best ramps of the search of larger units.

        There are none for few units, with which many rules take little time, and if other rules may be better.
        """
        best = best_by_slots(larger._best_ramps(), EXPLORED_AGAIN)
        few_units = len(self.workload.units) <= MAX_UNITS_EXPLORED
        if few_units or len(best) < EXPLORED_AGAIN or best[0] is not larger.best:
            return []
        return self._ramps.place(adapt(larger._ramps_of(best), larger.workload, self.workload))

    def _every_rule(self) -> list[Plan]:
        """Return the plans of simple and gradual rules."""
        starting_points = StartingPoints(self.workload, self._cost, self._budgets, self._setup)
        simple = encode(list(dict.fromkeys(starting_points.placements())))
        plans: list[Plan] = list(zip(simple, self._most_slots(simple), strict=True))
        if Placement.RESIDENT in self._cost.placements:
            numels = [unit.numel for unit in self.workload.units]
            streams = Placement.STREAMED in self._cost.placements
            plans += self._ramps.place(list(ramps(numels, self._bound.shares, streams=streams)))
        return plans

    @property
    def _fills(self) -> bool:
        """Return whether memory can be left that more residents could use."""
        return self._budgets.gpu_bytes is not None and Placement.RESIDENT in self._cost.placements

    @property
    def _good_enough(self) -> bool:
        return self.best is not None and self.best.seconds[0] <= ENOUGH * self._bound_s

    def _best_ramps(self) -> list[Candidate]:
        """Return the plans that are ramps, the best first."""
        found = (candidate for key, candidate in self._found.items() if key in self._ramps.ramp_of)
        return best_first(found)

    def _ramps_of(self, candidates: Iterable[Candidate]) -> list[Ramp]:
        return [self._ramps.ramp_of[candidate.key] for candidate in candidates]

    def _refine_once(self, leaders: Sequence[Candidate], others: Sequence[Plan]) -> list[Plan]:
        """Try ``others`` and moves from each of ``leaders``, and return plans with several of the moves that helped."""
        plans = min(PLANS_PER_ROUND, MAX_UNITS_PER_ROUND // len(self.workload.units))
        moved = [self._moved(leader, max(1, plans // len(leaders))) for leader in leaders]
        self._try([*others, *(plan for of_leader in moved for _, plan in of_leader)], leaders[-1].seconds[0])
        together: list[Plan] = []
        for leader, of_leader in zip(leaders, moved, strict=True):
            found = ((self._found.get(key_of(plan)), move) for move, plan in of_leader)
            helped = [(candidate.seconds, move) for candidate, move in found if candidate is not None]
            better = sorted((pair for pair in helped if pair[0] < leader.seconds), key=lambda pair: pair[0])
            moves = [move for _, move in better[:MOVES_TOGETHER]]
            together += [(codes, leader.num_slots) for codes in apply_together(leader.codes, moves)]
        return together

    def _filled(self, leader: Candidate) -> Iterator[Plan]:
        """Yield ``leader`` with its memory filled, as it is and with the last unit on the CPU.

        Forward waits for the last unit of the CPU and then for the copy of its parameters: a short one ends earlier.
        """
        last_on_cpu = leader.codes.copy()
        last_on_cpu[self._free[-1:]] = CODES[Placement.CPU]
        for codes, free in ((leader.codes, self._free), (last_on_cpu, self._free[:-1])):
            yield self._filler.fill(codes, leader.num_slots, free), leader.num_slots

    def _moved(self, leader: Candidate, most: int) -> list[tuple[Move, Plan]]:
        """Return up to ``most`` moves from ``leader`` that lead to plans that fit and are new, with these plans."""
        possible = tuple(CODES[placement] for placement in self._cost.placements)
        # Most moves from a plan that fills the memory do not fit.
        drawn = islice(draw_moves(leader.codes, self._free, possible, self._random), 6 * PLANS_PER_ROUND)
        moved: list[tuple[Move, Plan]] = []
        while moves := list(islice(drawn, most - len(moved))):
            plans = [(move, (move.apply(leader.codes), leader.num_slots + move.more_slots)) for move in moves]
            new = [(move, plan) for move, plan in plans if plan[1] > 0 and key_of(plan) not in self._found]
            moved += compress(new, self._which_fit([plan for _, plan in new]))
        return moved

    def _which_fit(self, plans: Sequence[Plan]) -> list[bool]:
        if not plans:
            return []
        codes, slots = np.array([codes for codes, _ in plans]), np.array([num_slots for _, num_slots in plans])
        return list(self._memory.which_fit(codes, slots))

    def _leaders(self) -> list[Candidate]:
        """Return the best plans, at most two for each number of slots."""
        return best_by_slots(self._found.values(), 2)

    def _try(self, plans: Iterable[Plan], enough_s: float, most: int = PLANS_PER_ROUND) -> None:
        """Simulate the ``most`` plans with the least lower bounds that fit and are new.

        Those that are known to expose at least ``enough_s`` are left out.
        """
        by_key = {key_of(plan): plan for plan in plans}
        new = [plan for key, plan in by_key.items() if key not in self._found]
        chosen = list(compress(new, self._which_fit(new)))
        if not chosen:
            return
        codes, slots = np.array([codes for codes, _ in chosen]), np.array([num_slots for _, num_slots in chosen])
        masks = {placement: codes == code for placement, code in CODES.items()}
        least_s = self._bounds.exposed_s(masks, int(slots.max()))
        promising = np.argsort(least_s, kind="stable")[:most]
        promising = promising[least_s[promising] < enough_s]
        codes, slots = codes[promising], slots[promising]
        if not len(codes):
            return
        times = self._simulator.run(codes, slots, enough_s)
        for row, num_slots, *seconds in zip(codes, slots.tolist(), times.exposed_s, times.active_s, strict=True):
            if seconds[0] < enough_s:
                candidate = Candidate(codes=row, num_slots=num_slots, seconds=(float(seconds[0]), float(seconds[1])))
                self._found[candidate.key] = candidate
                if self.best is None or candidate.seconds < self.best.seconds:
                    self.best = candidate

    def _most_slots(self, codes: Integers) -> list[int]:
        """Return, for each plan, the most slots that fit and that it can use, at least 1."""
        used = np.minimum((codes == CODES[Placement.STREAMED]).sum(axis=1), MAX_SLOTS)
        fitting = [used.clip(1, num_slots) for num_slots in range(1, MAX_SLOTS + 1)]
        fitting = [np.where(self._memory.which_fit(codes, slots), slots, 1) for slots in fitting]
        return list(np.max(fitting, axis=0).tolist())

    def _plan(self, codes: Integers, num_slots: int) -> UpdatePlan:
        placements = tuple(PLACEMENTS[code] for code in codes.tolist())
        return UpdatePlan(workload=self.workload, placements=placements, num_slots=num_slots)
