"""Which planning commands are there? Each is a module named ``..._command.py``.

Both ``python -m perf_model`` and ``deep-opt-states`` offer them. Rich and matplotlib are imported only when a command
prints a table or draws a picture.
"""
