"""How do all benchmarks run and compare? Each module answers one question:

- ``setting``: which model trains, with which batches, how often, and on which device?
- ``variants``: which engines are compared, and is an engine really the variant that it is labelled as?
- ``overrides``: how is something changed that no config key changes?
- ``bf16_products``: how are bf16 products computed on CPUs that are slow at them?
- ``interleaved_runs``: how long do the phases of each variant take, and which bits result?
- ``run_rows``: which rows do the runs give?
- ``rows``: how are rows stored and formatted?
"""
