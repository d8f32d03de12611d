"""``python -m perf_model``: one file a command. Rich and matplotlib are imported when something is printed or drawn."""
