"""How fast actions run that overlap: at most as fast as alone, and all slowed alike by the resource that binds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perf_model.cost import Load, Resource

_FULL = 1e-12


def shares(loads: Sequence[Load], capacities: Mapping[Resource, float]) -> list[float]:
    """Of each running action, its speed as a share of its speed alone. Max-min fair: progressive filling.

    All shares rise together until a resource is full; whoever uses that stays where it is, and the others rise on.
    They follow from what the actions are, not from how large: amounts and seconds alone grow alike.
    """
    result = [1.0] * len(loads)
    rising = {index for index, load in enumerate(loads) if load.alone_s > 0}
    left = dict(capacities)
    share = 0.0
    while rising:
        step, full = 1.0 - share, None
        for resource, capacity in left.items():
            use = sum(loads[index].amounts.get(resource, 0.0) / loads[index].alone_s for index in rising)
            if use > 0 and capacity / use < step - _FULL:
                step, full = max(0.0, capacity / use), resource
        for resource in left:
            left[resource] -= step * sum(loads[i].amounts.get(resource, 0.0) / loads[i].alone_s for i in rising)
        share += step
        stay = {index for index in rising if full is None or loads[index].amounts.get(full, 0.0) > 0}
        for index in stay:
            result[index] = share
        rising -= stay
    return result
