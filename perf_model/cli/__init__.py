"""Which planning commands are there? ``python -m perf_model`` and ``deep-opt-states`` offer each ``..._command.py``."""
