"""Name the parameters to whose partitions a script has written directly, with ``DEEP_OPT_STATES_CHECK=1``.

A write such as ``param.ds_tensor.data.mul_(0.5)`` after ``step()`` does not wait for the update in flight, which may
overwrite it. With the switch, updates end inside ``step()``, and forward compares each partition with a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from deep_opt_states import log
from deep_opt_states.names import CHECK_SWITCH, CONFIG_KEY
from deep_opt_states.zero.internals.compat import Parameter


def checks_direct_writes() -> bool:
    """Return whether the environment of this rank requests the comparison."""
    return os.environ.get(CHECK_SWITCH) == "1"


class DirectWrites:
    """The copies of partitions of ``params``, by name, that the last update has published."""

    def __init__(self, params: dict[str, Parameter]) -> None:
        self._params = params
        self._published: dict[str, torch.Tensor] = {}
        self._named: set[str] = set()

    def record(self) -> None:
        """Copy the partitions, which takes as much memory again."""
        self._published = {name: param.ds_tensor.detach().clone() for name, param in self._params.items()}

    def allow(self, params: Iterable[Parameter] | None = None) -> None:
        """Let the caller write to ``params`` until the next update; ``params`` defaults to all."""
        allowed = None if params is None else {param.ds_id for param in params}
        for name in list(self._published):
            if allowed is None or self._params[name].ds_id in allowed:
                del self._published[name]

    def report(self) -> None:
        """Log each parameter that was written to since ``record``, once in a run."""
        published, self._published = self._published, {}
        for name, copy in published.items():
            found = self._params[name].ds_tensor.detach().to(copy.device)
            if name in self._named or torch.equal(copy.view(torch.uint8), found.view(torch.uint8)):
                continue
            self._named.add(name)
            log.warn_this_rank(
                f"{CHECK_SWITCH}: the partition of {name} must only be written to by a call that waits for the update, "
                f"found a direct write between step() and forward. Without {CHECK_SWITCH}, it is kept or lost by "
                f"chance. Write in deepspeed.zero.GatheredParameters(..., modifier_rank=0), or read "
                f'engine.optimizer.fp16_partitioned_groups_flat first, or set "overlap_forward": false in the block '
                f'"{CONFIG_KEY}".'
            )
