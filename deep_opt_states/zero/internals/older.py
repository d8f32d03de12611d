"""Replace the hooks that older releases of DeepSpeed lack; each name contains the first release that has it.

``compat.py`` and ``spans.py`` replace other names where they use them, ``device/kernels/arithmetic.py`` finds the
powers of beta before 0.19 by trying, ``step()`` before 0.19.8 continues after a norm that is inf or NaN, and
``start/refusals.py`` refuses missing features.
"""

from __future__ import annotations

from typing import Any

import torch


class BackwardBefore_0_18_3:
    """A part of stock's optimizer whose method ``backward`` calls the hook ``backward_prologue`` of later releases."""

    def backward_prologue(self) -> None:
        """Do nothing: the work of later releases here is a part of this ``backward``."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients as stock does, after the hook."""
        self.backward_prologue()
        super().backward(*args, **kwargs)  # type: ignore[misc]


class ForwardBefore_0_18_5:
    """A part of stock's optimizer that calls the hook ``clear_backward_seen_flag`` of later releases."""

    module: torch.nn.Module
    _grad_acc_hooks: list[Any]

    def clear_backward_seen_flag(self) -> None:
        """Do nothing: there is no such flag."""

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Create stock's hooks, and one that is called before each forward, where later engines call the method."""
        super().create_reduce_and_remove_grad_hooks()  # type: ignore[misc]
        before_forward = self.module.register_forward_pre_hook(lambda *args: self.clear_backward_seen_flag())
        self._grad_acc_hooks.append(before_forward)


def with_later_hooks(stock: Any) -> Any:
    """Return stock's class, with the hooks of backward and forward that this release lacks."""
    parts = {"backward_prologue": BackwardBefore_0_18_3, "clear_backward_seen_flag": ForwardBefore_0_18_5}
    missing = [part for name, part in parts.items() if not hasattr(stock, name)]
    return type(stock.__name__, (*missing, stock), {}) if missing else stock
