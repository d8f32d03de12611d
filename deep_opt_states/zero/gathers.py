"""Every all-gather of parameters waits for their update, and forward gathers ahead only what is sure to be there.

Whatever reads parameters of ZeRO-3 gathers them by one of two methods that DeepSpeed gives each of them.
``all_gather_coalesced`` is what forward uses, on a stream of its own; ``all_gather`` is everybody else's
(``GatheredParameters``, consolidated checkpoints, parameters used outside their module).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deep_opt_states.zero.compat import Parameter
from deep_opt_states.zero.coordinator import Coordinator
from deep_opt_states.zero.update import Update


class Gathers:
    """``sub_groups`` by ``ds_id``: of the parameters of ``module`` that are not updated before ``step()`` returns."""

    def __init__(
        self, module: torch.nn.Module, coordinator: Any, update: Update, sub_groups: Mapping[int, int]
    ) -> None:
        self._update = update
        self._sub_groups = sub_groups
        self._coordinator = Coordinator(coordinator)
        self._release: list[Callable[[], object]] = [
            self._coordinator.around_fetch(self._fetch),
            module.register_forward_pre_hook(self._before_forward).remove,
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

    def _watch(self, param: Parameter) -> None:
        """Frozen ones, too: one method gathers whatever parameters it is given."""
        all_gather, all_gather_coalesced = param.all_gather, param.all_gather_coalesced

        def settled(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._before_any_reader([param] if param_list is None else param_list)
            return all_gather(param_list, *args, **kwargs)

        def published(params: Iterable[Parameter], *args: Any, **kwargs: Any) -> Any:
            params = list(params)
            # On the stream that gathers, which is current here.
            self._update.publish(self._sub_groups_of(params))
            return all_gather_coalesced(params, *args, **kwargs)

        param.all_gather, param.all_gather_coalesced = settled, published

        def release() -> None:
            param.all_gather, param.all_gather_coalesced = all_gather, all_gather_coalesced

        self._release.append(release)

    def _before_any_reader(self, params: Iterable[Parameter]) -> None:
        if any(param.ds_id in self._sub_groups for param in params):
            self._settle()

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        # What is evaluated or generated is used, whether or not there is another step.
        if not torch.is_grad_enabled():
            self._settle()

    def _settle(self) -> None:
        # What was known before is told where the states are used; a checkpoint that mends it is gathered, too.
        if not self._update.settled:
            self._update.settle()
            self._update.refuse_torn()

    def _fetch(self, fetch: Callable[..., Any], module: torch.nn.Module, forward: bool) -> Any:
        if not self._update.goes_on:
            return fetch(module, forward)
        self._update.advance()
        params = self._coordinator.params_of(module)
        # On the stream that computes: it reads them as well. And before the next modules' are looked at.
        self._update.wait_for(self._sub_groups_of(param for param in params if self._coordinator.is_partitioned(param)))
        with self._coordinator.prefetching_until(self._is_not_sure_to_be_there, params):
            return fetch(module, forward)

    def _is_not_sure_to_be_there(self, param: Parameter) -> bool:
        """DeepSpeed gathers the next modules' parameters before this one's kernels are launched: a host that waits for
        the CPU's update there leaves the GPU without work."""
        sub_group = self._sub_groups.get(param.ds_id)
        return sub_group is not None and self._update.may_block(sub_group)

    def _sub_groups_of(self, params: Iterable[Parameter]) -> list[int]:
        """In order: the schedule's actions are issued in order, too."""
        return sorted({self._sub_groups[param.ds_id] for param in params if param.ds_id in self._sub_groups})
