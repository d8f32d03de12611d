"""The prediction for a schedule: its time on a given machine, and the memory that it needs."""
