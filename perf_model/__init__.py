"""Decides where each sub-group of the optimizer state is updated, and in which order.

Imports the standard library and numpy (matplotlib in ``draw``, when a picture is asked for), never
torch: a plan for a machine one does not have is made in well under a second.

    HardwareProfile -> CostModel + Workload -> UpdatePlan -> Schedule -> Timeline

Every arrow is a value that can be saved, printed and compared.
"""
