"""Define formulas of the Megatron paper (arXiv 2104.04473) that the predictions are compared with.

``gpt_numel`` and ``gpt_iteration_flops`` are equations 2 and 3, which ``ModelShape`` generalises to other transformers.
Volumes are elements that one GPU sends; multiply by 2 for the bytes of 16-bit tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def gpt_numel(layers: int, hidden: int, vocab: int, sequence: int) -> float:
    """Return the number of parameters of a GPT model with learned positions (section 5.1, equation 2)."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + sequence) / (12 * layers * hidden))


def gpt_iteration_flops(layers: int, hidden: int, vocab: int, sequence: int, global_batch: int) -> float:
    """Return the operations of one iteration with activation recomputation (section 5.1, equation 3).

    The matrix products of the layers and of the logits are counted, over all GPUs.
    """
    flops = 96.0 * global_batch * sequence * layers * hidden**2
    return flops * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))


def pipeline_elements(micro_batch: int, sequence: int, hidden: int) -> int:
    """Return the elements between two pipeline stages, per micro-batch and direction (section 3.2)."""
    return micro_batch * sequence * hidden


def scattered_pipeline_elements(micro_batch: int, sequence: int, hidden: int, tensor_parallel: int) -> float:
    """Return the same with the scatter/gather optimisation, by which each GPU sends a part (section 4.1)."""
    return pipeline_elements(micro_batch, sequence, hidden) / tensor_parallel


def tensor_parallel_elements(micro_batch: int, sequence: int, hidden: int, tensor_parallel: int) -> float:
    """Return the elements of the all-reduces of one layer per micro-batch, 8 b s h (t - 1) / t (section 3.2).

    Forward has two all-reduces, and so has backward. A ring all-reduce sends each element twice. Recomputation repeats
    those of forward, which this number does not contain.
    """
    share = (tensor_parallel - 1) / tensor_parallel
    return 8 * pipeline_elements(micro_batch, sequence, hidden) * share


def gradient_all_reduce_elements(numel: float, data_parallel: int) -> float:
    """Return the elements of the all-reduce of ``numel`` gradients, which runs once per iteration (section 3.3.1)."""
    return 2 * numel * (data_parallel - 1) / data_parallel


def zero3_elements(numel: float, data_parallel: int) -> float:
    """Return the elements that ZeRO-3 sends per micro-batch for a model of ``numel`` parameters.

    Parameters are gathered in forward and in backward, and gradients are reduced (arXiv 1910.02054, section 7.2.2).
    """
    return 3 * numel * (data_parallel - 1) / data_parallel


def batch_s(sequences: int, micro_batch: int, stages: int, micro_batch_s: Callable[[int], float]) -> float:
    """Return the seconds of a batch of ``sequences`` per pipeline (section 3.4, equation 1), without communication.

    ``micro_batch_s`` returns the seconds of forward and backward of one stage for a micro-batch of a given size.
    """
    return (sequences / micro_batch + stages - 1) * micro_batch_s(micro_batch)


def best_micro_batch(sequences: int, stages: int, micro_batch_s: Callable[[int], float], sizes: Iterable[int]) -> int:
    """Return the one of ``sizes`` with which a batch takes the least time (section 3.4)."""
    return min(sizes, key=lambda size: batch_s(sequences, size, stages, micro_batch_s))
