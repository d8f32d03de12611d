"""Where is each unit of the optimizer state best updated, in which order, and how long does that take?

The package imports only the standard library, and rich, matplotlib or torch when a table, a picture or the model of a
``config.json`` is requested, so that a plan takes about a second. It can also be for another machine.

    HardwareProfile -> CostModel + Workload -> UpdatePlan -> Schedule -> Timeline
"""
