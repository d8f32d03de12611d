"""How do all benchmarks run, compare and report? Each module answers one question:

- ``setting``: which model trains, with which batches, and on which machine?
- ``sizes``: how large are the models, and how often does each variant run?
- ``variants``: which engines are compared, and is an engine really the variant that it is labelled as?
- ``overrides``: how is something changed that no config key changes?
- ``interleaved_runs``: how long do the phases of each variant take, and which bits result?
- ``run_rows``: which rows do the runs give?
- ``rows``: how are rows stored and formatted?
- ``targets``: which performance does the project aim for, and is it reached?
- ``charts``: how are rows drawn?
- ``results_page``: how does RESULTS.md show the rows?
"""
