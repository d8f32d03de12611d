"""Presets of machines and models, to plan without having them. They are not measurements of the user's machine."""
