"""Predict the published runs of the original artifact, and compare the predictions with what was measured.

The updates of the artifact are expressed as schedules of ours. The rates of a machine are fitted on a few runs, and
predict the other runs. Source: arXiv 2410.21316 and its logs, github.com/mauryaavinash95/deep-optimizer-states-results.
"""
