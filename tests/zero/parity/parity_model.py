"""Define a small network with odd sizes, and the batches that each rank trains on."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch.utils.checkpoint import checkpoint

from tests.zero.parity.case import Case


class ParityNet(torch.nn.Module):
    """Linear layers of the case's widths. Inputs have shape [batch, widths[0]], targets [batch, widths[-1]]."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        pairs = zip(case.widths[:-1], case.widths[1:], strict=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(inputs, outputs) for inputs, outputs in pairs)
        last = case.widths[-1]
        self.sometimes = torch.nn.Linear(last, last) if case.sometimes else None
        self.shared = torch.nn.ModuleList([torch.nn.Linear(last, last)] * case.uses_of_shared)
        self.unused = torch.nn.Linear(last, last) if case.unused else None
        if case.frozen:
            self.layers[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, target: torch.Tensor, sometimes: float, factor: float) -> torch.Tensor:
        """Return the loss. ``sometimes`` weights the layer of that name; with None the layer is not in the graph."""
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        for layer in self.shared:
            x = checkpoint(layer, x, use_reentrant=True)
        if self.sometimes is not None and sometimes is not None:
            x = x + sometimes * self.sometimes(x)
        return ((x - target).float() ** 2).mean() * factor


def batch(case: Case, rank: int, micro_batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * micro_batch + rank)
    x = torch.randn(4, case.widths[0], generator=generator)
    target = 8 * torch.randn(4, case.widths[-1], generator=generator)
    return x.to(dtype), target.to(dtype)


def param_groups(model: ParityNet, case: Case) -> list[dict[str, object]]:
    params = [param for param in model.parameters() if param.requires_grad]
    count = len(case.groups)
    return [{"params": params[position::count], **asdict(group)} for position, group in enumerate(case.groups)]
