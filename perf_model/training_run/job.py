"""Define ``Job``, the parts of a training run that a plan depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from perf_model.prediction.cost import DiskRates
from perf_model.prediction.memory import TrainingSetup
from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from perf_model.schedule.rules import NO_RULES, PlacementRules
from perf_model.schedule.workload import Partition, form_sub_groups
from perf_model.training_run.micro_batch import PARAM_BYTES, MicroBatch
from perf_model.training_run.model import ModelError, ModelShape, has_weight_decay, layer_in, require_integer

DEFAULT_SUB_GROUP_SIZE = 1_000_000_000

MAX_REUSE_DISTANCE = 1_000_000_000
"""DeepSpeed's default of ``stage3_max_reuse_distance``, within which reused parameters stay gathered."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run with ZeRO-3. Raise ``ModelError`` for a wrong number, ``RulesError`` for a rule without effect.

    Each of ``world_size`` ranks trains ``micro_batch`` sequences of ``sequence`` tokens at a time, and ``accumulation``
    micro-batches per update. ``tensor_parallel`` ranks of a node divide the matrices of each layer and train the same
    sequences (AutoTP). ``attention`` is a key of ``SCORE_BYTES``. ``recompute``: activations are recomputed in
    backward. ``offload_param``: the 16-bit parameters are in host memory and are uploaded for each gather.
    ``trainable_share`` of each layer is trained, and only these parameters have gradients, states and an update.
    ``states`` is a key of ``WIDTHS_OF_STATES``. States that do not fit into host memory are on a disk, with the rates
    ``disk`` of one rank.
    """

    shape: ModelShape
    world_size: int
    ranks_per_node: int
    micro_batch: int
    sequence: int
    recompute: bool = True
    accumulation: int = 1
    offload_param: bool = False
    trainable_share: float = 1.0
    tensor_parallel: int = 1
    attention: str = "flash"
    sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
    rules: PlacementRules = NO_RULES
    states: str = "fp32"
    disk: DiskRates | None = None

    def __post_init__(self) -> None:
        sizes = ("ranks_per_node", "world_size", "micro_batch", "sequence", "accumulation", "tensor_parallel")
        for key in (*sizes, "sub_group_size"):
            most = {"sequence": 10**7, "sub_group_size": 10**15}.get(key, 10**6)
            others = ", or --nodes (--gpus of a cluster)" if key == "world_size" else ""
            require_integer(key, getattr(self, key), 1, most, f"Correct --{key.replace('_', '-')}{others}.")
        if not 0 < self.trainable_share <= 1:
            rule = "trainable_share: must be above 0 and at most 1"
            raise ModelError(f"{rule}, found {self.trainable_share}.\nCorrect --trainable-share.")
        if self.world_size % self.ranks_on_node:
            rule = f"ranks_per_node: must divide the world size, {self.world_size}, found {self.ranks_per_node}"
            raise ModelError(f"{rule}.\nCorrect --ranks-per-node or --world-size (--gpus of a cluster).")
        for what, count in (("ranks of a node", self.ranks_on_node), ("key-value heads", self.shape.kv_heads)):
            if count % self.tensor_parallel:
                rule = f"tensor_parallel: must divide the number of {what}, {count}, found {self.tensor_parallel}"
                raise ModelError(f"{rule}.\nCorrect --tensor-parallel.")
        self.rules.check([tensor.name for tensor in self.shape.tensors], aliases=dict(self.shape.tied))

    @cached_property
    def shards(self) -> dict[str, int]:
        """Return the elements of each parameter that the data-parallel ranks partition."""
        return {name: shard_numel(name, numel, self.tensor_parallel) for name, numel in self.shape.parameters()}

    @property
    def shard_numel(self) -> int:
        return sum(self.shards.values())

    @property
    def padded_numel(self) -> int:
        """Return the length of one rank's partitions of all parameters, padding included."""
        return sum(map(self.partition_numel, self.shards.values()))

    @cached_property
    def partitions(self) -> list[Partition]:
        """Return one rank's partitions of the trained parameters, in the order of the model."""
        return [Partition(name, self.partition_numel(self.trained(shard))) for name, shard in self.shards.items()]

    def trained(self, numel: int) -> int:
        """Return how many of ``numel`` parameters are trained, rounded up."""
        return math.ceil(self.trainable_share * numel)

    def partition_numel(self, numel: int) -> int:
        """Return the length of one rank's partition of ``numel`` elements, padding included."""
        return -(-numel // self.data_parallel)

    @cached_property
    def sub_groups(self) -> list[list[Partition]]:
        """Return ``partitions`` by DeepSpeed's sub-groups."""
        # As in Hugging Face's Trainer, norms and biases form their own param group, without weight decay.
        groups = [[part for part in self.partitions if has_weight_decay(part.name) is decay] for decay in (True, False)]
        return [sub_group for group in groups for sub_group in form_sub_groups(group, self.sub_group_size)]

    @property
    def setup(self) -> TrainingSetup:
        """Return the facts about the optimizer's memory if an accelerator trains."""
        # Offloaded trained parameters are counted as the buffer of rounded ones, which takes as much pinned memory.
        return TrainingSetup(
            widths=WIDTHS_OF_STATES[self.states],
            longest_partition_numel=max(partition.numel for partition in self.partitions),
            accumulates=self.accumulation > 1,
            params_on_host=self.offload_param,
        )

    @property
    def offloaded_host_bytes(self) -> int:
        """Return the bytes of one rank's offloaded parameters in host memory that ``setup`` does not contain."""
        in_setup = sum(partition.numel for partition in self.partitions) if self.setup.widths.rounds else 0
        return PARAM_BYTES * (self.padded_numel - in_setup) if self.offload_param else 0

    @property
    def data_parallel(self) -> int:
        """Return the number of ranks that partition the same parameters."""
        return self.world_size // self.tensor_parallel

    @property
    def ranks_on_node(self) -> int:
        return min(self.ranks_per_node, self.world_size)

    @property
    def tokens(self) -> int:
        """Return the tokens per step, over all ranks and micro-batches."""
        return self.data_parallel * self.micro_batch * self.sequence * self.accumulation

    @cached_property
    def work(self) -> MicroBatch:
        shared, gathered_numel = self.shape.shared, self.shard_numel
        if shared is not None:
            # Shared layers stay gathered between their uses, unless DeepSpeed would traverse too many others.
            in_layers = sum(numel for name, numel in self.shards.items() if layer_in(shared.path, name) is not None)
            if in_layers > MAX_REUSE_DISTANCE:
                gathered_numel = sum(numel * shared.uses_of(name) for name, numel in self.shards.items())
        return MicroBatch(
            layers=self.shape.layers,
            modules=self.shape.modules,
            elements=self.micro_batch * self.sequence * self.shape.hidden,
            forward_flops=self._forward_flops,
            backward_flops=self._iteration_flops(self.recompute) - self._forward_flops,
            ranks=self.data_parallel,
            gathered_bytes=PARAM_BYTES * gathered_numel,
            reduced_bytes=self.trainable_share * PARAM_BYTES * self.shard_numel,
            uploaded_bytes=PARAM_BYTES * gathered_numel / self.data_parallel if self.offload_param else 0.0,
            tensor_parallel=self.tensor_parallel,
            recompute=self.recompute,
        )

    @property
    def _forward_flops(self) -> float:
        return self.shape.forward_flops(self.micro_batch, self.sequence) / self.tensor_parallel

    def _iteration_flops(self, recompute: bool) -> float:
        """Return the operations of one micro-batch. A frozen parameter has no gradient of its own."""
        flops = self.shape.iteration_flops(self.micro_batch, self.sequence, recompute) / self.tensor_parallel
        return flops - (1 - self.trainable_share) * self._forward_flops

    def mfu(self, iteration_s: float, peak_flops: float) -> float:
        """Return the model FLOPs utilisation: forward and backward, without recomputation, over the GPU's peak."""
        return self.accumulation * self._iteration_flops(recompute=False) / (iteration_s * peak_flops)


def shard_numel(name: str, numel: int, tensor_parallel: int) -> int:
    """Return the elements of the parameter ``name`` that a tensor-parallel rank holds: all of a norm or bias."""
    # AutoTP divides the matrices of layers. ``zero.Init``, with the same result, partitions embeddings over all ranks.
    return -(-numel // tensor_parallel) if has_weight_decay(name) else numel
