"""Define the interface of every Adam kernel, and the tensors and ranges that it updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

STATES = ("master", "exp_avg", "exp_avg_sq")
"""The tensors of ``AdamTensors`` that an update reads and writes."""

DEFAULT_BETAS = (0.9, 0.999)
"""The default betas of PyTorch and DeepSpeed."""


class StateDtypes(NamedTuple):
    """The dtypes of the master weights and of the moments."""

    master: torch.dtype
    moment: torch.dtype

    @property
    def by_name(self) -> dict[str, torch.dtype]:
        """Return the dtype of each of ``STATES``."""
        return dict(zip(STATES, (self.master, self.moment, self.moment), strict=True))

    @classmethod
    def found_in(cls, tensors: Any) -> StateDtypes:
        """Return the dtypes of the ``STATES`` of ``tensors``. Raise ``AssertionError`` if no kernel updates them."""
        found = cls(tensors.master.dtype, tensors.exp_avg.dtype)
        assert found in STATE_DTYPES, found
        assert tensors.exp_avg_sq.dtype == found.moment, tensors.exp_avg_sq.dtype
        return found


FP32_STATES = StateDtypes(torch.float32, torch.float32)
BF16_MASTERS = StateDtypes(torch.bfloat16, torch.float32)
"""DeepSpeed's ``bf16_master_weights_and_grads``."""
BF16_STATES = StateDtypes(torch.bfloat16, torch.bfloat16)
"""The same with ``bf16_optimizer_states``."""
STATE_DTYPES = (FP32_STATES, BF16_MASTERS, BF16_STATES)


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The hyperparameters of one sub-group's update, whose gradient is multiplied by ``grad_scale``."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_scale: float


@dataclass(frozen=True, kw_only=True)
class ElementRange:
    """The elements [begin, end) of a sub-group of ``sub_group_numel`` elements."""

    begin: int
    end: int
    sub_group_numel: int

    @classmethod
    def whole(cls, numel: int) -> ElementRange:
        """Return the range of all elements of a sub-group."""
        return cls(begin=0, end=numel, sub_group_numel=numel)

    def __post_init__(self) -> None:
        assert 0 <= self.begin <= self.end <= self.sub_group_numel, self

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of this range, of shape [numel], of ``tensor``, which holds the sub-group or the range."""
        # A schedule makes many views per action, which take most of the time to issue. A whole tensor needs none.
        return tensor if self.numel == tensor.numel() else tensor.narrow(0, self.begin, self.numel)


@dataclass(frozen=True, kw_only=True)
class AdamTensors:
    """The tensors of a sub-group, or of a range of one, of shape [numel] each, on the device of the kernel.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` have ``STATE_DTYPES`` and are updated in place. ``grad`` is bf16, fp16 or
    fp32; with bf16 master weights it is rounded to bf16, before and after it is scaled. ``param``, if any, receives
    the updated parameters, rounded to its dtype.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    param: torch.Tensor | None

    def narrow(self, element_range: ElementRange) -> AdamTensors:
        """Return views of ``element_range`` of these tensors of a sub-group."""
        return self.map(element_range.view)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> AdamTensors:
        """Return the results of ``change`` for each tensor that is not None."""
        changed: dict[str, Any] = {
            name: None if tensor is None else change(tensor) for name, tensor in vars(self).items()
        }
        return AdamTensors(**changed)


class UpdatedStates(NamedTuple):
    """Memory for the states after an update: tensors of shape [numel]."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeUpdate:
    """The update of one range of one sub-group. It equals itself alone, so that kernels can cache by it."""

    sub_group: int
    tensors: AdamTensors
    element_range: ElementRange
    updated: UpdatedStates | None = None
    """Memory for the new states; None updates in place, as all kernels but the C++ kernel do."""


class AdamKernel(ABC):
    """An Adam update whose results are bit-identical on every device, except for the bits of a NaN.

    All kernels have NaN in the same places, but IEEE 754 does not define its bits. In states, a GPU writes 0x7fffffff,
    and the C++ kernel on x86 is bit-identical to stock. Rounded to bf16, a NaN is 0x7fc0 on both, while PyTorch's CPU
    vectors write 0xffff. A step whose norm is NaN is skipped, as with stock, so only earlier NaNs are updated.
    """

    @abstractmethod
    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        """Set the hyperparameters of one step, per sub-group in DeepSpeed's order, before its first update."""

    def assume_step(self, steps: Sequence[AdamStep]) -> None:
        """Set hyperparameters that the next ``begin_step`` may replace as if never set, which stock's op cannot do."""
        assert not steps

    @abstractmethod
    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        """Update ``sub_group``, or the ``element_range`` that ``tensors`` hold. No order or range changes the bits."""

    def update_ranges(self, updates: Sequence[RangeUpdate]) -> None:
        """Update ranges of any sub-groups in one call, bit-identical to one ``update`` per range."""
        for update in updates:
            assert update.updated is None
            self.update(update.sub_group, update.tensors, update.element_range)

    @abstractmethod
    def restart(self) -> None:
        """Discard all earlier steps, as in a new process: the next step computes beta^t by ``pow``."""

    def zero(self, tensors: AdamTensors) -> None:
        """Zero all tensors. The C++ kernel does so on all its threads, whose first touch places the pages."""
        tensors.map(torch.Tensor.zero_)

    def close(self) -> None:
        """Free the resources that are not freed with the object."""
        return
