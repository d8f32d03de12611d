"""Machines and models by name, for planning without having them. No preset is a measurement of the user's machine."""
