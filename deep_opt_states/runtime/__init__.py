"""Execute a schedule on a device. This package never plans, and does not know DeepSpeed."""
