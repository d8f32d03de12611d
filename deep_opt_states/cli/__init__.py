"""Which commands does ``deep-opt-states`` have? ``main.py`` contains the parsers, and each command is a module."""
