"""How do all benchmarks run, compare and report? Each module answers one question:

- ``setting``: which model trains, with which batches, and on which machine?
- ``device``: which device trains?
- ``sizes``: how large are the models, and how often does each variant run?
- ``variants``: which engines are compared, and is an engine really the variant that it is labelled as?
- ``overrides``: how is something changed that no config key changes?
- ``bf16_products``: how are bf16 products computed on CPUs that are slow at them?
- ``interleaved_runs``: how long do the phases of each variant take, and which bits result?
- ``small_copies``: how long does a small copy wait beside the copies of states?
- ``run_rows``: which rows do the runs give?
- ``rows``: how are rows stored and formatted?
- ``targets``: which performance does the project aim for, and is it reached?
- ``charts``: how are rows drawn?
- ``headline``: how does RESULTS.md begin?
- ``results_page``: how does RESULTS.md show the rows?
"""
