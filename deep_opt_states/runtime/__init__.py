"""How is a schedule executed on a device? This package never plans, and does not depend on DeepSpeed."""
