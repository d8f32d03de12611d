"""Executes a schedule on a device. Never plans, and does not know DeepSpeed."""
