"""Execute a schedule on a device. This package never plans, and does not depend on DeepSpeed."""
