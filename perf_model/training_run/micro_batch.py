"""Predict the seconds of forward and backward of one micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup
from perf_model.prediction.slowdown import TYPICAL
from perf_model.schedule.host_layout import SIXTEEN_BIT, Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan

PARAM_BYTES = SIXTEEN_BIT.param

FORWARD_ALL_REDUCES = 2
"""The all-reduces of a layer's forward with tensor parallelism: one after attention, one after the feed-forward."""

TRAINING_SHARE = 0.65
"""The rate of training on a GPU, as a share of the rate of single matrix products, where only the latter is measured.
On our H200, backward with 16,384 tokens reached it (``tests/model/test_own_gpus.py``). The published runs on 4xA100 and
4xH100 reached 0.71 and 0.61."""


def training_flops_per_s(profile: HardwareProfile) -> float:
    """Return the rate of matrix products in training. Raise ``ProfileError`` if ``profile`` contains none."""
    if (measured := profile.get("training_flops_per_s")) is not None:
        return measured
    # No share of single products is known for a CPU.
    share = TRAINING_SHARE if profile.has_accelerator else 1.0
    return share * profile.rate("matmul_flops_per_s", purpose="forward and backward")


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The host's seconds per module, in which it runs hooks and launches kernels, and their ``source``.

    ``forward_s`` and ``backward_s`` are of ZeRO-3 without offloading, per micro-batch. Stock's copies of gradients add
    ``gradients_s`` to backward, and the plugin's hooks add ``hooks_s`` to forward. ``step_s`` is the part of ``step()``
    that does not depend on the number of parameters. ``cpu_slowdown`` is the share of the model's speed that is lost
    while the CPU updates.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    gradients_s: float = 0.0
    hooks_s: float = 0.0
    step_s: float = 0.0
    cpu_slowdown: float = 0.0
    source: str = ""

    @classmethod
    def from_profile(cls, profile: HardwareProfile) -> Overheads:
        """Return the measured seconds of ``profile``, or of our machines for a GPU without a measurement."""
        names = ("forward_s", "backward_s", "gradients_s", "step_s")
        found = {name: value for name in names if (value := profile.get(f"module_{name}")) is not None}
        if not profile.has_accelerator:
            return cls(**found, source="the profile")
        if len(found) == len(names):
            source = f"the profile, but hooks and the slowdown by updates are of {NEAREST_HOST.source}"
            return replace(NEAREST_HOST, **found, source=source)
        return NEAREST_HOST

    @property
    def of_plugin(self) -> Overheads:
        return replace(self, forward_s=self.forward_s + self.hooks_s)

    @property
    def of_stock(self) -> Overheads:
        return replace(self, backward_s=self.backward_s + self.gradients_s)


NO_OVERHEADS = Overheads()

NEAREST_HOST = Overheads(
    forward_s=0.65e-3,
    backward_s=1.2e-3,
    gradients_s=0.3e-3,
    hooks_s=0.17e-3,
    step_s=0.3e-3,
    cpu_slowdown=TYPICAL.cpu,
    source="our runs on H100 and H200, with hosts of 16 cores, and not of this machine",
)
"""The seconds on the only hosts that this project measured (docs/dev/performance_model.md lists all terms)."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The connections among the ranks of a job, ``ranks_per_node`` of them on each node.

    Rates are bytes per second and rank, while all ranks communicate. A rate that is unknown is infinite. A collective
    is a ring through all d ranks (NCCL), in which each rank passes on (d - 1) / d of the whole (arXiv 1909.09756).
    Copies inside a node and across nodes overlap, so the slower of them counts.
    """

    ranks_per_node: int
    all_gather_bytes_per_s: float = math.inf
    reduce_scatter_bytes_per_s: float = math.inf
    inter_node_bytes_per_s: float = math.inf

    def all_gather_s(self, whole_bytes: float, ranks: int) -> float:
        """Return the seconds in which each of ``ranks`` ranks gathers ``whole_bytes``, of which it has one part."""
        return self._ring_s(whole_bytes, ranks, self.all_gather_bytes_per_s)

    def reduce_scatter_s(self, whole_bytes: float, ranks: int) -> float:
        """Return the seconds in which ``ranks`` ranks sum ``whole_bytes``, and each keeps one part of the sum."""
        return self._ring_s(whole_bytes, ranks, self.reduce_scatter_bytes_per_s)

    def _ring_s(self, whole_bytes: float, ranks: int, in_node_bytes_per_s: float) -> float:
        assert ranks >= 1
        on_node = min(ranks, self.ranks_per_node)
        # A rank of a ring sends this share of the whole (arXiv 2104.04473, section 3.3.1).
        passed_bytes = whole_bytes * (ranks - 1) / ranks
        in_node_s = passed_bytes / in_node_bytes_per_s if on_node > 1 else 0.0
        across_s = passed_bytes / (on_node * self.inter_node_bytes_per_s) if ranks > on_node else 0.0
        return max(in_node_s, across_s)


@dataclass(frozen=True, kw_only=True)
class PhaseRates:
    """The rates of forward and backward. ``h2d_bytes_per_s`` limits the upload of offloaded parameters."""

    flops_per_s: float
    network: Network
    overheads: Overheads = NO_OVERHEADS
    h2d_bytes_per_s: float = math.inf

    @classmethod
    def from_profile(cls, profile: HardwareProfile, ranks_per_node: int, overheads: Overheads) -> PhaseRates:
        """Return the rates of ``profile``. Raise ``ProfileError`` if it has no rate of matrix products."""
        names = ("all_gather_bytes_per_s", "reduce_scatter_bytes_per_s", "inter_node_bytes_per_s")
        network_rates = {name: profile.get(name) or math.inf for name in names}
        return cls(
            flops_per_s=training_flops_per_s(profile),
            network=Network(ranks_per_node=ranks_per_node, **network_rates),
            overheads=overheads,
            h2d_bytes_per_s=profile.get("h2d_bytes_per_s") or math.inf,
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The work of one rank for one micro-batch, if ``ranks`` ranks partition the parameters.

    ``elements`` are the tokens times the hidden size. ``gathered_bytes`` are gathered in forward and again in backward.
    ``uploaded_bytes`` are copied to the accelerator for each gather. ``reduced_bytes`` are all gradients.
    ``tensor_parallel`` ranks share the matrix products of a layer and sum its activations, twice in each forward and
    backward (arXiv 2104.04473, section 2.3). ``recompute``: backward repeats forward.
    """

    layers: int
    modules: int
    elements: float
    forward_flops: float
    backward_flops: float
    ranks: int
    gathered_bytes: float
    reduced_bytes: float
    uploaded_bytes: float = 0.0
    tensor_parallel: int = 1
    recompute: bool = True

    def forward_s(self, rates: PhaseRates) -> float:
        """Return the seconds of forward. Gathers, launches and arithmetic overlap, so the slowest of them counts."""
        return max(
            self._layers_s(self.forward_flops, FORWARD_ALL_REDUCES, rates),
            self.modules * rates.overheads.forward_s,
            self._gather_s(rates),
        )

    def backward_s(self, rates: PhaseRates) -> float:
        """Return the seconds of backward. Gather and reduction share the network."""
        again, host = int(self.recompute), rates.overheads
        return max(
            self._layers_s(self.backward_flops, FORWARD_ALL_REDUCES * (1 + again), rates),
            self.modules * (host.backward_s + again * host.forward_s),
            self._gather_s(rates) + self._network(rates).reduce_scatter_s(self.reduced_bytes, self.ranks),
        )

    def _gather_s(self, rates: PhaseRates) -> float:
        gather_s = self._network(rates).all_gather_s(self.gathered_bytes, self.ranks)
        return max(gather_s, self.uploaded_bytes / rates.h2d_bytes_per_s)

    def _layers_s(self, flops: float, all_reduces: int, rates: PhaseRates) -> float:
        """Return the seconds of matrix products and of the sums of activations between them."""
        ranks, whole_bytes = self.tensor_parallel, PARAM_BYTES * self.elements
        sum_s = rates.network.reduce_scatter_s(whole_bytes, ranks) + rates.network.all_gather_s(whole_bytes, ranks)
        return flops / rates.flops_per_s + self.layers * all_reduces * sum_s

    def _network(self, rates: PhaseRates) -> Network:
        return replace(rates.network, ranks_per_node=max(1, rates.network.ranks_per_node // self.tensor_parallel))


@dataclass(frozen=True, kw_only=True)
class GradientPath:
    """Bytes of gradients that one rank copies down and up in the last backward, and both ways in each earlier one."""

    down_bytes: int = 0
    up_bytes: int = 0
    accumulated_bytes: int = 0

    def seconds(self, profile: HardwareProfile) -> tuple[float, float]:
        """Return the seconds of the copies in the last and in each earlier backward, 0 if a rate is waived."""
        # DeepSpeed issues all of them on one stream, where they run one after another.
        d2h, h2d = map(profile.get, ("d2h_bytes_per_s", "h2d_bytes_per_s"))
        if d2h is None or h2d is None:
            return 0.0, 0.0
        earlier_s = self.accumulated_bytes / d2h + self.accumulated_bytes / h2d
        return self.down_bytes / d2h + self.up_bytes / h2d, earlier_s

    @classmethod
    def for_plan(cls, plan: UpdatePlan, setup: TrainingSetup = DEFAULT_SETUP) -> GradientPath:
        """Return the bytes of our runtime, which copies the gradients of the CPU's units down once."""
        # If their sums are not on the accelerator, each micro-batch copies them down, and each but the first copies
        # them up before. The copy up is counted in all but the last.
        down_bytes = PARAM_BYTES * plan.numel(Placement.CPU)
        on_accelerator = any(placement is not Placement.CPU for placement in plan.placements)
        keeps_sums = not setup.accumulates or setup.keeps_sums(updates_on_accelerator=on_accelerator)
        return cls(down_bytes=down_bytes, accumulated_bytes=0 if keeps_sums else down_bytes)

    @classmethod
    def for_stock(cls, plan: UpdatePlan, widths: Widths = SIXTEEN_BIT) -> GradientPath:
        """Return the bytes of stock DeepSpeed and Twin-Flow.

        Each gradient is copied down to the buffer that accumulates it, and up again (``stage3.py``,
        ``partition_grads``). A later micro-batch copies the sum up and down again. In the last backward, gradients of
        states on the host are copied down once more in the dtype of the masters
        (``_offload_grad_partition_at_boundary``).
        """
        once_bytes = PARAM_BYTES * plan.workload.numel
        in_masters_dtype = widths.master * (plan.workload.numel - plan.numel(Placement.RESIDENT))
        return cls(down_bytes=once_bytes + in_masters_dtype, up_bytes=once_bytes, accumulated_bytes=once_bytes)
