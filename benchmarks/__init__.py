"""How does the plugin compare with stock DeepSpeed? ``docs/benchmarking.md`` explains how to run the benchmarks.

Each benchmark answers one question, which is the first line of its file. It is a module, or a package where it needs
several files:

- ``adam/``: how fast is one Adam update, on the CPU and on the GPU?
- ``planner/``: how good are the plans, and how long does planning take?
- ``emulated/``: how long do stock and ours take on emulated machines, and what does the model predict?
- ``gpu/``: how does the plugin compare with other ways to train billions of parameters on one GPU?
- ``slots/``: what would more staging slots gain?
- all other modules: see their first lines, or run ``python -m benchmarks --help``.

The other folders:

- ``harness/``: how do all benchmarks run engines, store rows, draw charts and write the page?
- ``results/``: which values were measured? Rows (``*.jsonl``), charts and traces, by machine.
- ``data/``: which runs did the authors of the original artifact publish, and what did the first GPUs show?

``RESULTS.md`` is generated from the rows.
"""
