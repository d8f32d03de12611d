"""Which benchmarks there are: a module of ``benchmarks`` each.

Its ``measure(quick=...)`` yields rows, or raises ``Waived``; its ``PICTURE`` says what is drawn of them.
"""

from __future__ import annotations

BENCHMARKS = {
    "copy": "How fast are copies between host and accelerator, by direction and size?",
    "adam": "How fast is one Adam update, on the CPU and on the GPU?",
    "update_phase": "How long does the update take, beside stock and its neighbours?",
    "overlap": "How much of the update is seen, with overlap off, in backward, in forward, and both?",
    "training_step": "What does an iteration take, by phase, micro-batch, accumulation and size?",
    "ablation": "What does each part gain by itself?",
    "trace": "Where do the seconds of a step go?",
    "exactness": "Are losses and weights stock's, over hundreds of steps?",
    "model_error": "How far off are predictions, by placement?",
    "planner": "How good are plans, and how long does planning take?",
    "overhead": "What does the plugin cost where nothing can be gained?",
    "scaling": "What becomes of it with more ranks?",
}


class Waived(Exception):
    """This machine cannot answer the question: why."""
