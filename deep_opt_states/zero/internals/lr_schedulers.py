"""Check whether an LR scheduler of DeepSpeed or PyTorch can load its state from a checkpoint.

PyTorch's (``torch/optim/lr_scheduler.py``) take over any entries, and read only the few that are checked here.
"""

from __future__ import annotations

from numbers import Number
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

VALUES_OF_PLATEAU = {"mode": ("min", "max"), "threshold_mode": ("rel", "abs")}


def problem_of_scheduler(scheduler: Any, saved: Any) -> str | None:
    """Return the rule that ``saved`` breaks, or None if ``scheduler.load_state_dict(saved)`` can load it."""
    if not isinstance(saved, dict):
        saves_dict = isinstance(scheduler.state_dict(), dict)
        return f"the state of a {type(scheduler).__name__} must be a dict" if saves_dict else None
    # From the object: a wrapper may forward its attributes to the scheduler inside.
    defined_in = getattr(scheduler.load_state_dict, "__module__", None)
    if hasattr(scheduler.load_state_dict, "__wrapped__"):
        return None
    if defined_in == lr_schedules.__name__:
        number = isinstance(saved.get("last_batch_iteration"), (Number, torch.Tensor))
        return None if number else "last_batch_iteration must be a number"
    return _problem_for_torch(scheduler, saved) if defined_in == lr_scheduler.__name__ else None


def _problem_for_torch(scheduler: Any, saved: dict[str, Any]) -> str | None:
    if isinstance(scheduler, (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)):
        states = saved.get("lr_lambdas")
        if not isinstance(states, (list, tuple)):
            return "lr_lambdas must be a list of states"
        # PyTorch skips None, also beyond the end of our list.
        if not all(map(_can_update, [*scheduler.lr_lambdas, *[None] * len(states)], states)):
            return "each of lr_lambdas must be None, or the attributes of such a function as ours"
    elif isinstance(scheduler, (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)):
        states, schedulers = saved.get("_schedulers"), scheduler._schedulers
        if not isinstance(states, (list, tuple)) or len(states) > len(schedulers):
            return f"_schedulers must be a list of at most {len(schedulers)} states"
        return next(filter(None, map(problem_of_scheduler, schedulers, states)), None)
    elif isinstance(scheduler, lr_scheduler.CyclicLR):
        known = "_scale_fn_custom" in saved and _can_update(scheduler._scale_fn_custom, saved["_scale_fn_custom"])
        return None if known else "_scale_fn_custom must be None, or the attributes of such a function as ours"
    elif isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        for key, values in VALUES_OF_PLATEAU.items():
            if key in saved and saved[key] not in values:
                return f"{key} must be one of {', '.join(values)}"
    return None


def _can_update(function: Any, state: Any) -> bool:
    """Return whether PyTorch can update ``function`` by ``state``, which is None for a plain function."""
    return state is None or (isinstance(state, dict) and hasattr(function, "__dict__"))
