"""How does the plugin compare with stock DeepSpeed?

Each benchmark answers one question, which is the first line of its file. It is a module, or a package where it needs
several files:

- ``adam/``: how fast is one Adam update, on the CPU and on the GPU?
- ``emulated/``: how long do stock and ours take on EMULATED machines and disks, and are the predictions near?
- ``gpu/``: how does the plugin compare with other ways to train billions of parameters on one GPU?
- ``published/``: how near are predictions to the published runs of the original artifact?
- all other modules: see their first lines, or run ``python -m benchmarks --help``.

The others:

- ``harness/``: how do all benchmarks run engines and store rows?
- ``report.py``: how does RESULTS.md show the rows?
- ``results/``: which values were measured? Rows (``*.jsonl``) and the chart of the page.
- ``reports/``: which values did earlier benchmarks measure? Dated pages that are not edited.
- ``data/``: which runs did the authors of the original artifact publish, and how did the first GPUs run?
"""
