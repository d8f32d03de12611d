"""Tests of updates that start in backward, and of what comes between backward and ``step()``."""
