"""States as checkpoint engines get them."""

from __future__ import annotations

import torch


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, under a storage that is the borrower's.

    What PyTorch sends to another process it moves to shared memory, the storage with it: the states would leave the
    slab for good when a decoupled checkpoint engine saves them. So it is the borrower's that moves, with a copy, which
    no later update changes.
    """
    if not tensor.is_cpu:
        # Sent as a handle to where it is; DeepSpeed waits before its next step until what it has sent is written.
        return tensor
    borrowed = torch.from_numpy(tensor.detach().numpy()).requires_grad_(tensor.requires_grad)
    # DeepSpeed's numbers of the parameters in it, which are saved too.
    vars(borrowed).update(vars(tensor))
    return borrowed
