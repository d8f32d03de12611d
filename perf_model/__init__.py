"""Where is each unit of the optimizer state best updated, in which order, and how long does that take?

The package imports only the standard library, ``rich`` in ``cli``, and matplotlib in ``draw`` when a picture
is requested. Only the model of a ``config.json`` needs torch, so that a plan takes about a second. A plan can also be
for another machine.

    HardwareProfile -> CostModel + Workload -> UpdatePlan -> Schedule -> Timeline

Every arrow passes on a value that can be saved, printed and compared.
"""
