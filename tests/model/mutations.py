"""Mutate schedules: each generator yields faulty schedules, each with a description of the fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from perf_model.schedule.schedule import Schedule


def without_one_wait(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedule without one of its waits."""
    for position, action in enumerate(schedule.actions):
        for name in action.waits:
            mutant = replace(action, waits=tuple(wait for wait in action.waits if wait != name))
            actions = (*schedule.actions[:position], mutant, *schedule.actions[position + 1 :])
            yield f"{action.name} no longer waits for {name}", replace(schedule, actions=actions)


def with_two_actions_swapped(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedule with two of its actions swapped."""
    for first, second in combinations(range(len(schedule.actions)), 2):
        actions = list(schedule.actions)
        actions[first], actions[second] = actions[second], actions[first]
        fault = f"{actions[second].name} and {actions[first].name} swapped"
        yield fault, replace(schedule, actions=tuple(actions))


def with_one_action_dropped(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedule without one of its actions."""
    for position, action in enumerate(schedule.actions):
        actions = schedule.actions[:position] + schedule.actions[position + 1 :]
        yield f"{action.name} dropped", replace(schedule, actions=actions)


def with_one_action_repeated(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedule with one of its actions issued twice."""
    for position, action in enumerate(schedule.actions):
        actions = (*schedule.actions[: position + 1], *schedule.actions[position:])
        yield f"{action.name} repeated", replace(schedule, actions=actions)
