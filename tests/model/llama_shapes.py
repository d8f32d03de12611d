"""Make the shapes of small models like Llama."""

from __future__ import annotations

from perf_model.training_run.families.decoder import DecoderWidths, attention, decoder, feed_forward, norms
from perf_model.training_run.families.dense import BEFORE_EACH
from perf_model.training_run.model import ModelShape


def llama_shape(name: str, widths: DecoderWidths) -> ModelShape:
    """Return the shape of a Llama of these widths, whose output has a weight of its own."""
    of_layer = [
        *attention(widths),
        *feed_forward(widths.hidden, widths.intermediate),
        *norms(BEFORE_EACH, widths.hidden),
    ]
    return decoder(name, widths, lambda number: of_layer)
