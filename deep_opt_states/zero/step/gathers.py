"""Make every all-gather of parameters wait for their update, and limit forward's prefetch to updated parameters.

Forward gathers with ``all_gather_coalesced``, on a stream of its own, and all other readers with ``all_gather``. That
stream waits here for the caller's, which may have written to a partition, as in
``GatheredParameters(modifier_rank=0)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from deep_opt_states.zero.internals import partition_hooks
from deep_opt_states.zero.internals.compat import Parameter, partitioned_params
from deep_opt_states.zero.internals.coordinator import Coordinator
from deep_opt_states.zero.step.direct_writes import DirectWrites, checks_direct_writes
from deep_opt_states.zero.step.running_plan import RunningPlan
from deep_opt_states.zero.step.update import Update
from perf_model.schedule.workload import Workload


class Gathers:
    """The hooks into DeepSpeed's gathers of the model of ``optimizer``, until ``resources`` are closed."""

    def __init__(self, optimizer: Any, update: Update, running: RunningPlan, resources: ExitStack) -> None:
        self._update, self._running = update, running
        self._partitioned = partitioned_params(optimizer)
        self._units_of_workload: tuple[Workload, dict[int, list[int]]] | None = None
        self._coordinator = Coordinator(optimizer)
        self._caller_may_have_written = True
        self._is_in_step = False
        # Also frozen parameters, which the caller may write to and forward gathers.
        module = optimizer.module
        by_name: dict[str, Parameter] = dict(module.named_parameters())
        self._names: dict[int, str] = {param.ds_id: name for name, param in by_name.items()}
        # An update never overwrites a write to a persistent parameter: it is updated when ``step()`` returns.
        ds_ids = {param.ds_id for param in self._partitioned}
        deferred = {name: param for name, param in by_name.items() if param.ds_id in ds_ids}
        self.direct_writes = DirectWrites(deferred if checks_direct_writes() else {})
        for release in (
            self._coordinator.wrap_fetch(self._fetch),
            # Before DeepSpeed's own hook, which gathers and prefetches.
            module.register_forward_pre_hook(self._before_forward, prepend=True).remove,
            # Before DeepSpeed's own hook, which ends the trace.
            module.register_forward_hook(lambda *_: self._coordinator.mark_end_of_forward(), prepend=True).remove,
            partition_hooks.register(self),
        ):
            resources.callback(release)

    def used_names(self) -> list[str] | None:
        """Return the names of the parameters, once per use and in the order of forward; None until that is recorded."""
        ds_ids = self._coordinator.uses()
        return None if ds_ids is None else [self._names[ds_id] for ds_id in ds_ids if ds_id in self._names]

    def first_uses(self) -> list[int]:
        """Return the units in the order in which forward needs them, as on all ranks; none until that is recorded."""
        ds_ids = self._coordinator.uses() or ()
        return list(dict.fromkeys(unit for ds_id in ds_ids for unit in self._units.get(ds_id, ())))

    @property
    def _units(self) -> dict[int, list[int]]:
        """Return the units that hold each partitioned parameter, by ``ds_id``. They change with the plan."""
        workload = self._running.plan.workload
        if self._units_of_workload is None or self._units_of_workload[0] is not workload:
            self._units_of_workload = workload, self._running.units_of(self._partitioned)
        return self._units_of_workload[1]

    def order_after_caller(self) -> None:
        """Make the next all-gathers wait for the stream on which the caller writes to partitions."""
        self._caller_may_have_written = True

    @contextmanager
    def by_the_step(self) -> Iterator[None]:
        """Mark the gathers inside this context as DeepSpeed's own, to which no caller writes."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def before_all_gather(self, params: Sequence[Parameter]) -> None:
        """Wait for the update of ``params``, and let the caller write to the partitions that it receives."""
        if any(param.ds_id in self._units for param in params):
            self._finish_update()
        # If one rank holds all of a parameter, the caller writes to the partition itself, before ``before_write``.
        if not self._is_in_step and any(param.ds_tensor.numel() == param.ds_numel for param in self._own(params)):
            self.direct_writes.allow(params)

    def before_all_gather_coalesced(self, params: Sequence[Parameter]) -> None:
        """Make the current stream, which gathers, wait for the update of ``params``."""
        waits = self._update.unit_waits
        if not waits.are_over and (own := self._own(params)):
            waits.publish(self._units_of(own))

    def before_write(self, params: Sequence[Parameter]) -> None:
        """Let the caller write to the partitions, even in the middle of forward or backward."""
        if self._own(params):
            self.order_after_caller()
            self.direct_writes.allow(params)

    def before_new_engine(self, params: Sequence[Parameter]) -> None:
        """End the update before another engine copies ``params``. Raise ``UpdateFailed`` on all ranks if it failed."""
        if self._own(params):
            self._update.synchronize_ranks()
            self.direct_writes.allow(params)

    def _own(self, params: Iterable[Parameter]) -> list[Parameter]:
        return [param for param in params if param.ds_id in self._names]

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        self.order_after_caller()
        self.direct_writes.report()
        self._running.windows.before_forward(trains=torch.is_grad_enabled())
        # Report a failed update also to evaluation and generation, which no step follows.
        if not torch.is_grad_enabled():
            self._finish_update()

    def _finish_update(self) -> None:
        # Not raised if all ranks know the failure: this gather may belong to the load of a checkpoint.
        if not self._update.ranks_agree:
            self._update.synchronize_ranks()

    def _fetch(self, fetch: Callable[..., Any], module: torch.nn.Module, forward: bool) -> Any:
        if self._caller_may_have_written:
            self._coordinator.gather_after_current_stream()
            self._caller_may_have_written = False
        waits = self._update.unit_waits
        if not self._update.is_deferred or waits.are_over:
            return fetch(module, forward)
        self._update.advance()
        params = self._coordinator.params_of(module)
        # The computing stream reads the parameters as well. It waits before the prefetch looks at the next modules.
        partitioned = filter(self._coordinator.is_partitioned, params)
        waits.wait_for(self._units_of(partitioned))
        # DeepSpeed makes the computing stream wait for every all-gather in flight.
        with self._running.exposure.waits.for_gathering_stream():
            if waits.none_may_block:
                return fetch(module, forward)
            with self._coordinator.prefetching_until(self._may_block, params):
                return fetch(module, forward)

    def _may_block(self, param: Parameter) -> bool:
        """Return whether prefetching ``param`` now could block the host, and so delay this module's kernels."""
        units = self._units.get(param.ds_id, ())
        return self._update.is_deferred and any(map(self._update.unit_waits.may_block, units))

    def _units_of(self, params: Iterable[Parameter]) -> list[int]:
        return sorted({unit for param in params for unit in self._units.get(param.ds_id, ())})
