"""Which commands does ``deep-opt-states`` have? ``main.py`` has the parsers, and each command is a module."""
