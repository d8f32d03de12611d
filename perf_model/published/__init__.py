"""The published runs of the original artifact, and what the cost model predicts of them.

Its schedules are schedules of ours; the rates of a machine are fitted on a few runs and predict the others.
Source: arXiv 2410.21316 and its logs, github.com/mauryaavinash95/deep-optimizer-states-results.
"""
