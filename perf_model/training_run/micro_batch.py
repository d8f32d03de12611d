"""Predict the seconds of forward and backward of one micro-batch: matrix products, launches, gathers and reductions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from perf_model.prediction.hardware import MATMUL_SIZE, SMALL_MATMUL_SIZE, HardwareProfile
from perf_model.prediction.network import Network

BACKWARD_LAUNCHES = 2
"""The host's time in backward, recomputation included, relative to forward: in the published runs of narrow models,
whose kernels are shorter than their launches, it is 1.7 to 2.1."""

FORWARD_ALL_REDUCES = 2
"""The sums of activations in the forward of a layer with tensor parallelism: of attention and of the feed-forward."""

ACTIVATION_BYTES = 2
"""Bytes per element of an activation."""

TRAINING_SHARE = 0.65
"""The rate of all operations of a training on a GPU, as a share of that of single matrix products: attention, norms and
element-wise kernels take the rest of the time. The limits of 190 and 480 TFLOPS that fit the published runs on 4xA100
and 4xH100 are 0.71 and 0.61 of 267.9 and 792.1 TFLOPS, the fastest products measured on one A100 SXM and one H100 SXM
(github.com/stas00/ml-engineering, ``compute/accelerator``, "Maximum Achievable Matmul FLOPS"). The forms of those GPUs
are not published, so the share is known to about a tenth."""


@dataclass(frozen=True, kw_only=True)
class MatrixRate:
    """The rate of the operations in training, which rises with the size of the matrix products.

    A product with ``elements`` elements in its result runs at ``limit_flops_per_s * elements / (elements +
    half_elements)``: it reaches half of the limit at ``half_elements``, because a small product does not fill the
    accelerator. With 0 the rate is the same for all sizes.
    """

    limit_flops_per_s: float
    half_elements: float = 0.0

    @classmethod
    def from_profile(cls, profile: HardwareProfile) -> MatrixRate:
        """Return the rate in training, by the curve through both products of ``profile``; constant with only one.

        On a GPU, training reaches ``TRAINING_SHARE`` of it. No share is known for a CPU that trains, whose rate is that
        of the products. Raise ``ProfileError`` if there is no product at all.
        """
        products = cls._of_products(profile)
        share = TRAINING_SHARE if profile.has_accelerator else 1.0
        return replace(products, limit_flops_per_s=share * products.limit_flops_per_s)

    @classmethod
    def _of_products(cls, profile: HardwareProfile) -> MatrixRate:
        large = profile.rate("matmul_flops_per_s", purpose="forward and backward")
        small = profile.get("matmul_small_flops_per_s")
        if small is None or small >= large:
            return cls(limit_flops_per_s=large)
        elements, small_elements = MATMUL_SIZE**2, SMALL_MATMUL_SIZE**2
        # A rate of large / 16 or less would make the limit infinite or negative. With this bound, which noise does not
        # reach, it is at most 15/8 of ``large``.
        small = max(small, 2 * large * small_elements / elements)
        slope = (1 / small - 1 / large) / (1 / small_elements - 1 / elements)
        limit = 1 / (1 / large - slope / elements)
        return cls(limit_flops_per_s=limit, half_elements=slope * limit)

    def flops_per_s(self, elements: float) -> float:
        """Return the floating-point operations per second of a product with ``elements`` elements in its result."""
        return self.limit_flops_per_s * elements / (elements + self.half_elements)


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Fixed seconds of the host.

    ``layer_s`` is the time in which the host issues one layer of one forward: DeepSpeed's hooks around each module and
    the launches of its kernels. The accelerator computes meanwhile, so the slower of both determines the time.
    ``iteration_s`` is the time of an iteration outside of forward, backward and update, such as norms and logging.
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
    """The rates that forward and backward depend on.

    ``h2d_bytes_per_s`` limits the upload of offloaded parameters. DeepSpeed keeps the trained ones in page-locked
    memory, independently of ``offload_param.pin_memory``: ``_create_param_groups_fp16_flat_cpu_memory`` in
    ``stage3.py``.
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

    ``elements`` are those of an activation, tokens times hidden size. The operations are those of this rank.
    ``gathered_bytes`` is the size of the model that a rank gathers once in forward and once more in backward,
    ``reduced_bytes`` that of all gradients, and ``uploaded_bytes`` are copied to its accelerator for each gather if
    parameters are offloaded.
    ``tensor_parallel`` ranks of a node share the matrix products of a layer and sum its activations, twice in forward
    and ``backward_all_reduces`` times in backward (arXiv 2104.04473, section 2.3).
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
    backward_all_reduces: int = 4

    def forward_s(self, rates: PhaseRates) -> float:
        """Return the seconds of forward: gathers, launches and arithmetic overlap, so the slowest of them counts."""
        return max(
            self._products_s(self.forward_flops, rates) + self._all_reduces_s(FORWARD_ALL_REDUCES, rates),
            self.layers * rates.overheads.layer_s,
            self._gather_s(rates),
        )

    def backward_s(self, rates: PhaseRates) -> float:
        """Return the seconds of backward, with recomputation: its gather and its reduction use the same network."""
        reduce_s = self._among_data_parallel(rates).reduce_scatter_s(self.reduced_bytes, self.ranks)
        return max(
            self._products_s(self.backward_flops, rates) + self._all_reduces_s(self.backward_all_reduces, rates),
            BACKWARD_LAUNCHES * self.layers * rates.overheads.layer_s,
            self._gather_s(rates) + reduce_s,
        )

    def _gather_s(self, rates: PhaseRates) -> float:
        """Return the seconds of one all-gather of the model; parts are uploaded while others are gathered."""
        return max(
            self._among_data_parallel(rates).all_gather_s(self.gathered_bytes, self.ranks),
            self.uploaded_bytes / rates.h2d_bytes_per_s,
        )

    def _products_s(self, flops: float, rates: PhaseRates) -> float:
        """Return the seconds of matrix products, whose results tensor-parallel ranks share."""
        return flops / rates.matrix.flops_per_s(self.elements / self.tensor_parallel)

    def _all_reduces_s(self, per_layer: int, rates: PhaseRates) -> float:
        """Return the seconds of the sums of activations, which nothing hides: the next product needs each of them."""
        activation_bytes = ACTIVATION_BYTES * self.elements
        reduce_s = rates.network.reduce_scatter_s(activation_bytes, self.tensor_parallel)
        gather_s = rates.network.all_gather_s(activation_bytes, self.tensor_parallel)
        return self.layers * per_layer * (reduce_s + gather_s)

    def _among_data_parallel(self, rates: PhaseRates) -> Network:
        """Return the network of the ranks that partition the same parameters: those of other nodes are with them."""
        return replace(rates.network, ranks_per_node=max(1, rates.network.ranks_per_node // self.tensor_parallel))
