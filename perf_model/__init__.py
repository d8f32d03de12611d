"""Where and in which order is each unit of the optimizer state best updated, and how long does that take?

The package needs only the standard library. rich, matplotlib and torch are imported when they are used.

    HardwareProfile -> CostModel + Workload -> UpdatePlan -> Schedule -> Timeline
"""
