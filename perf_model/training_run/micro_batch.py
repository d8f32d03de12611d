"""Predict the seconds of forward and backward of one micro-batch: matrix products, launches, gathers and reductions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from perf_model.prediction.hardware import MATMUL_SIZE, SMALL_MATMUL_SIZE, HardwareProfile
from perf_model.prediction.memory import DEFAULT_SETUP, SIXTEEN_BIT, TrainingSetup
from perf_model.prediction.network import Network
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import FP32_BYTES

PARAM_BYTES = SIXTEEN_BIT.param
"""Bytes per parameter of a bf16 model, and per element of its gradients and activations."""

BACKWARD_LAUNCHES = 2
"""The host's time in backward, recomputation included, relative to forward: in the published runs of narrow models,
whose kernels are shorter than their launches, it is 1.7 to 2.1."""

FORWARD_ALL_REDUCES = 2
"""The sums of activations in the forward of a layer with tensor parallelism: of attention and of the feed-forward."""

TRAINING_SHARE = 0.65
"""The rate of all operations of a training run on a GPU, as a share of the rate of single matrix products: attention,
norms and element-wise kernels take the rest of the time. The limits of 190 and 480 TFLOPS that fit the published runs
on 4xA100 and 4xH100 are 0.71 and 0.61 of 267.9 and 792.1 TFLOPS, the fastest products measured on one A100 SXM and one
H100 SXM (github.com/stas00/ml-engineering, ``compute/accelerator``, "Maximum Achievable Matmul FLOPS"). The forms of
those GPUs are not published, so the share is known to about a tenth."""


@dataclass(frozen=True, kw_only=True)
class MatrixRate:
    """The rate of the operations in training, which rises with the size of the matrix products.

    A product with ``elements`` elements in its result runs at ``limit_flops_per_s * elements / (elements +
    half_elements)``, because a small product does not fill the accelerator.
    """

    limit_flops_per_s: float
    half_elements: float = 0.0

    @classmethod
    def from_profile(cls, profile: HardwareProfile) -> MatrixRate:
        """Return the rate in training, by the curve through both products of ``profile``; constant with only one.

        On a GPU, training reaches ``TRAINING_SHARE`` of it. No share is known for a CPU that trains, which gets the
        rate of the products. Raise ``ProfileError`` if there is no product at all.
        """
        share = TRAINING_SHARE if profile.has_accelerator else 1.0
        large = profile.rate("matmul_flops_per_s", purpose="forward and backward")
        small = profile.get("matmul_small_flops_per_s")
        if small is None or small >= large:
            return cls(limit_flops_per_s=share * large)
        elements, small_elements = MATMUL_SIZE**2, SMALL_MATMUL_SIZE**2
        # A rate of large / 16 or less would make the limit infinite or negative. With this bound, which noise does not
        # reach, it is at most 15/8 of ``large``.
        small = max(small, 2 * large * small_elements / elements)
        slope = (1 / small - 1 / large) / (1 / small_elements - 1 / elements)
        limit = 1 / (1 / large - slope / elements)
        return cls(limit_flops_per_s=share * limit, half_elements=slope * limit)

    def flops_per_s(self, elements: float) -> float:
        """Return the floating-point operations per second of a product with ``elements`` elements in its result."""
        return self.limit_flops_per_s * elements / (elements + self.half_elements)


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Fixed seconds of the host: ``iteration_s`` outside of forward, backward and update, such as norms and logging.

    In ``layer_s``, the host issues one layer of one forward: DeepSpeed's hooks around each module and the launches of
    its kernels. The accelerator computes meanwhile, so the slower of both determines the time.
    """

    layer_s: float = 0.0
    iteration_s: float = 0.0


NO_OVERHEADS = Overheads()

PUBLISHED_OVERHEADS = Overheads(layer_s=0.0046, iteration_s=0.36)
"""The overheads of the published stock runs on 4xH100-80GB (``benchmarks/data/published_runs.csv``), which were trained
with Megatron-DeepSpeed: medians of forward_s over layers of the models up to 13B, and of iteration_s less its three
phases. No other machine or script was measured."""


@dataclass(frozen=True, kw_only=True)
class PhaseRates:
    """The rates that forward and backward depend on. ``h2d_bytes_per_s`` limits the upload of offloaded parameters.

    DeepSpeed always keeps the trained ones in page-locked memory (``_create_param_groups_fp16_flat_cpu_memory``).
    """

    matrix: MatrixRate
    network: Network
    overheads: Overheads = NO_OVERHEADS
    h2d_bytes_per_s: float = math.inf

    @classmethod
    def from_profile(cls, profile: HardwareProfile, ranks_per_node: int, overheads: Overheads) -> PhaseRates:
        """Return the rates of ``profile``. Raise ``ProfileError`` if it has no rate of matrix products."""
        return cls(
            matrix=MatrixRate.from_profile(profile),
            network=Network.from_profile(profile, ranks_per_node),
            overheads=overheads,
            h2d_bytes_per_s=profile.get("h2d_bytes_per_s") or math.inf,
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The work of one rank for one micro-batch with ZeRO-3 among ``ranks`` ranks, which partition the parameters.

    ``elements`` are the tokens times the hidden size. ``gathered_bytes`` are gathered once in forward and once more in
    backward, and ``uploaded_bytes`` are copied to the accelerator for each gather if parameters are offloaded.
    ``reduced_bytes`` are all gradients. ``tensor_parallel`` ranks of a node share the matrix products of a layer and
    sum its activations, twice in forward and ``backward_all_reduces`` times in backward (arXiv 2104.04473, section
    2.3).
    """

    layers: int
    elements: float
    forward_flops: float
    backward_flops: float
    ranks: int
    gathered_bytes: float
    reduced_bytes: float
    uploaded_bytes: float = 0.0
    tensor_parallel: int = 1
    backward_all_reduces: int = 2 * FORWARD_ALL_REDUCES

    def forward_s(self, rates: PhaseRates) -> float:
        """Return the seconds of forward: gathers, launches and arithmetic overlap, so the slowest of them counts."""
        return max(
            self._layers_s(self.forward_flops, FORWARD_ALL_REDUCES, rates),
            self.layers * rates.overheads.layer_s,
            self._gather_s(rates),
        )

    def backward_s(self, rates: PhaseRates) -> float:
        """Return the seconds of backward, with recomputation: its gather and its reduction use the same network."""
        return max(
            self._layers_s(self.backward_flops, self.backward_all_reduces, rates),
            BACKWARD_LAUNCHES * self.layers * rates.overheads.layer_s,
            self._gather_s(rates) + self._network(rates).reduce_scatter_s(self.reduced_bytes, self.ranks),
        )

    def _gather_s(self, rates: PhaseRates) -> float:
        """Return the seconds of one all-gather of the model; parts are uploaded while others are gathered."""
        gather_s = self._network(rates).all_gather_s(self.gathered_bytes, self.ranks)
        return max(gather_s, self.uploaded_bytes / rates.h2d_bytes_per_s)

    def _layers_s(self, flops: float, all_reduces: int, rates: PhaseRates) -> float:
        """Return the seconds of matrix products, and of the sums of activations that each next product needs."""
        ranks, whole_bytes = self.tensor_parallel, PARAM_BYTES * self.elements
        sum_s = rates.network.reduce_scatter_s(whole_bytes, ranks) + rates.network.all_gather_s(whole_bytes, ranks)
        return flops / rates.matrix.flops_per_s(self.elements / ranks) + self.layers * all_reduces * sum_s

    def _network(self, rates: PhaseRates) -> Network:
        """Return the network of the ranks that partition the same parameters, a part of those of each node."""
        return replace(rates.network, ranks_per_node=max(1, rates.network.ranks_per_node // self.tensor_parallel))


@dataclass(frozen=True, kw_only=True)
class GradientPath:
    """Bytes of gradients that one rank copies down to host memory and up again in the last backward before an update.

    The ``accumulated`` bytes count for each earlier backward of the step.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    accumulated_down_bytes: int = 0
    accumulated_up_bytes: int = 0

    def seconds(self, profile: HardwareProfile) -> tuple[float, float]:
        """Return the seconds of the copies in the last backward and in each earlier one; 0 if a rate is waived."""
        # DeepSpeed issues all of them on one stream, where they run one after another.
        d2h, h2d = map(profile.get, ("d2h_bytes_per_s", "h2d_bytes_per_s"))
        if d2h is None or h2d is None:
            return 0.0, 0.0
        earlier_s = self.accumulated_down_bytes / d2h + self.accumulated_up_bytes / h2d
        return self.down_bytes / d2h + self.up_bytes / h2d, earlier_s

    @classmethod
    def for_plan(cls, plan: UpdatePlan, setup: TrainingSetup = DEFAULT_SETUP) -> GradientPath:
        """Return the bytes of our runtime: gradients are copied down once for the CPU, and not for the accelerator.

        If the sums over micro-batches are not on the accelerator (``TrainingSetup.keeps_sums``), each micro-batch
        copies those of the CPU's units down, and each but the first copies them up before. The copy up is counted in
        all but the last.
        """
        down_bytes = PARAM_BYTES * plan.numel(Placement.CPU)
        on_accelerator = any(placement is not Placement.CPU for placement in plan.placements)
        keeps_sums = not setup.accumulates or setup.keeps_sums(updates_on_accelerator=on_accelerator)
        each_bytes = 0 if keeps_sums else down_bytes
        return cls(down_bytes=down_bytes, accumulated_down_bytes=each_bytes, accumulated_up_bytes=each_bytes)

    @classmethod
    def for_stock(cls, plan: UpdatePlan) -> GradientPath:
        """Return the bytes of stock DeepSpeed and Twin-Flow.

        Each gradient is copied down to the buffer that accumulates it, and up again (``stage3.py``,
        ``partition_grads``); a later micro-batch copies the sum up and down again. In the last backward, if the states
        are not on the GPU, it is copied down once more, in fp32 (``_offload_grad_partition_at_boundary``).
        """
        once_bytes = PARAM_BYTES * plan.workload.numel
        fp32_bytes = FP32_BYTES * (plan.workload.numel - plan.numel(Placement.RESIDENT))
        each = {"up_bytes": once_bytes, "accumulated_down_bytes": once_bytes, "accumulated_up_bytes": once_bytes}
        return cls(down_bytes=once_bytes + fp32_bytes, **each)
