"""The command line ``deep-opt-states``: ``main.py`` has the parsers, and each command a module ``..._command.py``."""
