"""Model how long an all-gather or a reduce-scatter takes inside a node and across nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perf_model.prediction.hardware import HardwareProfile


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

    @classmethod
    def from_profile(cls, profile: HardwareProfile, ranks_per_node: int) -> Network:
        names = ("all_gather_bytes_per_s", "reduce_scatter_bytes_per_s", "inter_node_bytes_per_s")
        return cls(ranks_per_node=ranks_per_node, **{name: profile.get(name) or math.inf for name in names})

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
