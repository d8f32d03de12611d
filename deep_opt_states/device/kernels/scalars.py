"""Compute the numbers that an Adam kernel multiplies with, bit-identical to DeepSpeedCPUAdam.

That op (``deepspeed/ops/csrc/includes/cpu_adam.h``, ``IncrementStep``) keeps beta^t as a running product in fp32 while
steps follow one another with the same betas. After any other change it computes ``pow``; before DeepSpeed 0.19, also
after a second call with the same step. The order of stock's calls thus changes its bits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, ElementRange, RangeUpdate
from deep_opt_states.device.kernels.arithmetic import Arithmetic


class Decay(IntEnum):
    """The kinds of weight decay: ``DECOUPLED`` in AdamW, ``L2`` in Adam, with the values of ``csrc/update.h``."""

    NONE = 0
    DECOUPLED = 1
    L2 = 2


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The numbers of one update in fp32. ``decay`` is -lr * weight_decay (``DECOUPLED``) or weight_decay (``L2``)."""

    grad_scale: np.float32
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    bias_correction2: np.float32
    """1 / sqrt(1 - beta2^t)"""
    eps: np.float32
    step_size: np.float32
    """-lr / (1 - beta1^t)"""
    decay: np.float32
    decay_kind: Decay


ONE = np.float32(1)


class BetaPowers:
    """The powers beta^t as stock's object with these ``betas`` computes them (``Arithmetic.pow_when_repeated``)."""

    def __init__(self, betas: tuple[float, float], *, adamw: bool, pow_when_repeated: bool = False) -> None:
        self._betas = np.float32(betas[0]), np.float32(betas[1])
        self._adamw = adamw
        self._pow_when_repeated = pow_when_repeated
        self._step = 0
        self._powers = ONE, ONE

    def scalars(self, steps: Sequence[AdamStep]) -> list[Scalars]:
        """Return the numbers of one step's updates, from one entry per sub-group in DeepSpeed's order."""
        # Stock's op in C++ also overflows silently.
        with np.errstate(all="ignore"):
            return [self._scalars(step) for step in steps]

    def _scalars(self, step: AdamStep) -> Scalars:
        """Compute as ``update_state`` and the first lines of ``Step_AVX`` do, operation by operation."""
        self._increment(step)
        beta1, beta2 = self._betas
        lr, weight_decay = np.float32(step.lr), np.float32(step.weight_decay)
        correction1 = correction2 = ONE
        if step.bias_correction:
            correction1 = ONE - self._powers[0]
            correction2 = ONE / np.sqrt(ONE - self._powers[1])
        kind = Decay.NONE
        if weight_decay > 0:
            kind = Decay.DECOUPLED if self._adamw else Decay.L2
        return Scalars(
            grad_scale=np.float32(step.grad_scale),
            beta1=beta1,
            one_minus_beta1=ONE - beta1,
            beta2=beta2,
            one_minus_beta2=ONE - beta2,
            bias_correction2=correction2,
            eps=np.float32(step.eps),
            step_size=-lr / correction1,
            decay=-lr * weight_decay if kind is Decay.DECOUPLED else weight_decay,
            decay_kind=kind,
        )

    def _increment(self, step: AdamStep) -> None:
        betas = np.float32(step.beta1), np.float32(step.beta2)
        if betas == self._betas and step.step == self._step and not self._pow_when_repeated:
            return
        if betas == self._betas and step.step == self._step + 1:
            self._powers = self._powers[0] * betas[0], self._powers[1] * betas[1]
        else:
            # std::pow(float, size_t) computes with doubles.
            self._powers = _power(betas[0], step.step), _power(betas[1], step.step)
        self._betas, self._step = betas, step.step


def _power(beta: np.float32, step: int) -> np.float32:
    return np.float32(math.pow(float(beta), step))


ArgumentsT = TypeVar("ArgumentsT")


class OnePassAdam(AdamKernel, Generic[ArgumentsT]):
    """A kernel of ours, which passes ``ArgumentsT`` of the numbers of a sub-group's step with each of its ranges."""

    def __init__(self, arithmetic: Arithmetic, betas: tuple[float, float], *, adamw: bool) -> None:
        self._arithmetic = arithmetic
        self._betas, self._adamw = betas, adamw
        self.restart()

    @abstractmethod
    def _arguments_of(self, scalars: Scalars) -> ArgumentsT:
        """Return ``scalars`` as the kernel receives them."""

    def restart(self) -> None:
        self._powers = BetaPowers(self._betas, adamw=self._adamw, pow_when_repeated=self._arithmetic.pow_when_repeated)
        self._arguments: list[ArgumentsT] = []

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._arguments = [self._arguments_of(scalars) for scalars in self._powers.scalars(steps)]

    def assume_step(self, steps: Sequence[AdamStep]) -> None:
        # The powers of beta go on from the last step that was begun.
        self._arguments = [self._arguments_of(scalars) for scalars in copy(self._powers).scalars(steps)]

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        element_range = element_range or ElementRange.whole(tensors.master.numel())
        self.update_ranges([RangeUpdate(sub_group=sub_group, tensors=tensors, element_range=element_range)])
