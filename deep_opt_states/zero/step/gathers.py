"""Every all-gather of parameters waits for their update, and forward gathers ahead only what is sure to be there.

Whatever reads parameters of ZeRO-3 gathers them by one of two methods that DeepSpeed gives each of them.
``all_gather_coalesced`` is what forward uses, on a stream of its own; ``all_gather`` is everybody else's
(``GatheredParameters``, consolidated checkpoints, parameters used outside their module).

DeepSpeed's all-gather stream does not wait for the stream that the training script works on. A partition that the
script has written, for example in ``GatheredParameters(modifier_rank=0)`` or by loading a checkpoint, would be gathered
as it was before. DeepSpeed's throughput timer hides that by synchronising the device in each step, unless it is
configured otherwise. Here the all-gather stream waits for the caller's stream wherever the caller may have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deep_opt_states.zero.internals.compat import Parameter
from deep_opt_states.zero.internals.coordinator import Coordinator
from deep_opt_states.zero.step.update import Update


class Gathers:
    """``sub_groups`` by ``ds_id``: of the parameters of ``module`` that are not updated before ``step()`` returns."""

    def __init__(
        self, module: torch.nn.Module, coordinator: Any, update: Update, sub_groups: Mapping[int, int]
    ) -> None:
        self._update = update
        self._sub_groups = sub_groups
        self._coordinator = Coordinator(coordinator)
        self._caller_may_have_written = True
        self._release: list[Callable[[], object]] = [
            self._coordinator.around_fetch(self._fetch),
            # Before DeepSpeed's own hook, which gathers this module's parameters and prefetches those of the next ones.
            module.register_forward_pre_hook(self._before_forward, prepend=True).remove,
        ]
        for param in module.parameters():
            self._watch(param)

    def first_uses(self) -> list[int] | None:
        """The sub-groups in the order in which forward needs them, on every rank the same; None before it is known."""
        ds_ids = self._coordinator.first_uses()
        if ds_ids is None:
            return None
        return list(dict.fromkeys(self._sub_groups[ds_id] for ds_id in ds_ids if ds_id in self._sub_groups))

    def release(self) -> None:
        while self._release:
            self._release.pop()()

    def order_after_caller(self) -> None:
        """Make the next fetch wait for the stream that is current there: until then the caller may write partitions."""
        self._caller_may_have_written = True

    def _watch(self, param: Parameter) -> None:
        """Frozen ones, too: one method gathers whatever parameters it is given."""
        all_gather, all_gather_coalesced, partition = param.all_gather, param.all_gather_coalesced, param.partition

        def settled(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._before_any_reader([param] if param_list is None else param_list)
            return all_gather(param_list, *args, **kwargs)

        def written_back(
            param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
        ) -> Any:
            # Also in the middle of forward or backward, for example in a module's hook.
            if has_been_updated:
                self.order_after_caller()
            return partition(param_list, hierarchy, has_been_updated, free_data)

        def published(params: Iterable[Parameter], *args: Any, **kwargs: Any) -> Any:
            params = list(params)
            # On the stream that gathers, which is current here.
            self._update.publish(self._sub_groups_of(params))
            return all_gather_coalesced(params, *args, **kwargs)

        param.all_gather, param.all_gather_coalesced, param.partition = settled, published, written_back

        def release() -> None:
            param.all_gather, param.all_gather_coalesced = all_gather, all_gather_coalesced
            param.partition = partition

        self._release.append(release)

    def _before_any_reader(self, params: Iterable[Parameter]) -> None:
        if any(param.ds_id in self._sub_groups for param in params):
            self._settle()

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        self.order_after_caller()
        # What is evaluated or generated is used, whether or not there is another step.
        if not torch.is_grad_enabled():
            self._settle()

    def _settle(self) -> None:
        # What was known before is told where the states are used; a checkpoint that mends it is gathered, too.
        if not self._update.settled:
            self._update.settle()
            self._update.refuse_torn()

    def _fetch(self, fetch: Callable[..., Any], module: torch.nn.Module, forward: bool) -> Any:
        if self._caller_may_have_written:
            self._caller_may_have_written = False
            self._coordinator.gather_after_current_stream()
        if not self._update.goes_on:
            return fetch(module, forward)
        self._update.advance()
        params = self._coordinator.params_of(module)
        # On the stream that computes: it reads them as well. And before the next modules' are looked at.
        self._update.wait_for(self._sub_groups_of(param for param in params if self._coordinator.is_partitioned(param)))
        with (
            self._coordinator.prefetching_until(self._is_not_sure_to_be_there, params),
            # DeepSpeed makes the computing stream wait for every all-gather in flight, not only for this module's.
            self._update.gathers_awaited(),
        ):
            return fetch(module, forward)

    def _is_not_sure_to_be_there(self, param: Parameter) -> bool:
        """DeepSpeed gathers the next modules' parameters before this one's kernels are launched: a host that waits for
        the CPU's update there leaves the GPU without work."""
        sub_group = self._sub_groups.get(param.ds_id)
        return sub_group is not None and self._update.may_block(sub_group)

    def _sub_groups_of(self, params: Iterable[Parameter]) -> list[int]:
        """In order: the schedule's actions are issued in order, too."""
        return sorted({self._sub_groups[param.ds_id] for param in params if param.ds_id in self._sub_groups})
