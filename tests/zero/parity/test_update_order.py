"""Check that units are updated in the order in which forward uses them, once DeepSpeed has recorded it."""

from __future__ import annotations

from unittest import mock

from deep_opt_states.runtime.issuer import Issuer
from perf_model.schedule.schedule import Schedule
from tests.ranks import on_ranks
from tests.zero.parity.case import Case
from tests.zero.parity.cases import BASE_GROUP, DECAYING_GROUP
from tests.zero.parity.training import assert_same_bits, run_variant

BLOCK = {"placement": "stride", "update_stride": 2, "num_slots": 1}


def test_updates_follow_the_order_of_forward_and_keep_the_bits_of_stock() -> None:
    orders = on_ranks(2, published_orders)
    for overlapped, at_once in orders:
        by_index, as_used = overlapped
        assert sorted(as_used) == sorted(by_index)
        # The second param group's first layers come before the first group's last ones.
        assert as_used != by_index
        # Without overlap no forward waits for the update, so the order is not changed, and no unit is persistent.
        assert by_index[0] == 0
        assert at_once == [[unit - 1 for unit in by_index[1:]]]
        assert overlapped == orders[0][0], "the orders of the ranks differ"


def published_orders() -> list[list[list[int]]]:
    """Return the orders of units in all schedules that the executor used, with overlap in forward and without.

    The units of the param groups are not in the order of forward.
    """
    found = []
    set_schedule = Issuer.set_schedule
    for overlap in (True, False):
        block = {**BLOCK, "overlap_forward": overlap}
        case = Case(name="ordered", blocks=(block,), groups=(BASE_GROUP, DECAYING_GROUP), world_size=2, clip=0.3)
        published: list[list[int]] = []

        def recorded(self: Issuer, schedule: Schedule, published: list[list[int]] = published) -> None:
            kinds = ("PUBLISH", "GPU_STEP")
            published.append([action.unit for action in schedule.actions if action.kind.value in kinds])
            set_schedule(self, schedule)

        stock = run_variant(case, None)
        with mock.patch.object(Issuer, "set_schedule", recorded):
            assert_same_bits(stock, run_variant(case, block))
        found.append(published)
    return found
